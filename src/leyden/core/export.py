"""A module out of and into files: load_from_checkpoint, ONNX, TorchScript, TensorRT."""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from leyden.base.errors import MisconfigurationException
from leyden.base.log import warn_once
from leyden.core.loading import class_only, load_module

__all__ = ["ExportMixin"]


class ExportMixin:
    """The parts of LightningModule that read and write files."""

    # TorchScript reads every property of a module; while it does, `trainer` must not raise.
    _jit_is_scripting = False

    @class_only
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Creates the module with the hyperparameters in a checkpoint, and loads its weights.

        ``configure_model`` is called if the class has it. The module ends up on the device of the checkpoint's weights.

        Args:
            checkpoint_path: A path, an fsspec URL, or an open binary file.
            map_location: Where to load to, as in ``torch.load``. Default: where the weights were when they were saved,
                or the CPU if that device isn't here.
            hparams_file: A ``.yaml`` or ``.csv`` file with hyperparameters to use in place of the checkpoint's.
            strict: Whether the keys must be those of this module's state dict. Default: ``strict_loading``.
            weights_only: False also loads a file that names code to run; only for files that you trust. Default: True.
            **kwargs: Arguments of ``__init__``, over those in the checkpoint.

        Raises:
            UnsafeCheckpointError: The file needs more than plain values, and ``weights_only`` isn't False.
            TypeError: ``__init__`` needs an argument that is not in the file; or this was called on an instance.
        """
        return load_module(cls, checkpoint_path, map_location, hparams_file, strict, weights_only, **kwargs)

    @torch.no_grad()
    def to_onnx(self: Any, file_path: Any = None, input_sample: Any = None, **kwargs: Any) -> Any:
        """Exports the model with ``torch.onnx.export``.

        Args:
            file_path: Where to; None with ``dynamo=True`` to get the program only.
            input_sample: An input of `forward`. Default: ``example_input_array``.
            **kwargs: Passed on to ``torch.onnx.export``.

        Returns:
            What ``torch.onnx.export`` returns: an ``ONNXProgram`` with ``dynamo=True``, else None.
        """
        default = inspect.signature(torch.onnx.export).parameters.get("dynamo")
        dynamo = kwargs.get("dynamo", default is not None and default.default)
        for package in ("onnx", "onnxscript") if dynamo else ("onnx",):
            if importlib.util.find_spec(package) is None:
                raise ModuleNotFoundError(
                    f"{type(self).__name__}.to_onnx(dynamo={dynamo}) needs the package {package}: pip install {package}"
                )
        sample = _sample(self, input_sample, "ONNX", "input_sample")
        # As a string: torch.onnx takes a path object in some of its versions only.
        file_path = file_path if file_path is None or hasattr(file_path, "write") else str(file_path)
        with _mode_kept(self):
            return torch.onnx.export(self, sample, file_path, **kwargs)

    @torch.no_grad()
    def to_torchscript(
        self: Any, file_path: Any = None, method: str = "script", example_inputs: Any = None, **kwargs: Any
    ) -> Any:
        """Compiles the model with TorchScript, in eval mode.

        PyTorch has deprecated TorchScript; ``torch.export.export(model, args)`` is its successor.

        Args:
            file_path: Where to save it as well: a path or an fsspec URL.
            method: "script" or "trace".
            example_inputs: What to trace with. Default: ``example_input_array``.
            **kwargs: Passed on to ``torch.jit.script`` or ``torch.jit.trace``.

        Returns:
            The script module.
        """
        warn_once("PyTorch has deprecated TorchScript for `torch.export.export(model, args)`", DeprecationWarning)
        if method not in ("script", "trace"):
            raise ValueError(f"to_torchscript(method={method!r}): must be 'script' or 'trace'")
        if method == "trace":
            example_inputs = _sample(self, example_inputs, "TorchScript with method='trace'", "example_inputs")
            if kwargs.get("check_inputs") is not None:
                kwargs["check_inputs"] = _to_device(self, kwargs["check_inputs"])
        with _mode_kept(self), _scripting():
            if method == "script":
                script = torch.jit.script(self.eval(), **kwargs)
            else:
                script = torch.jit.trace(self.eval(), example_inputs, **kwargs)
        if file_path is not None:
            import fsspec

            with fsspec.open(str(file_path), "wb") as file:
                torch.jit.save(script, file)
        return script

    @torch.no_grad()
    def to_tensorrt(
        self: Any,
        file_path: Any = None,
        input_sample: Any = None,
        ir: str = "default",
        output_format: str = "exported_program",
        retrace: bool = False,
        default_device: str | torch.device = "cuda",
        **compile_kwargs: Any,
    ) -> Any:
        """Compiles the model with ``torch_tensorrt.compile``, in eval mode.

        Args:
            file_path: Where to save it as well.
            input_sample: An input of `forward`. Default: ``example_input_array``.
            ir: "default", "dynamo" or "ts".
            output_format: "exported_program" or "torchscript"; only the latter with ``ir="ts"``.
            retrace: Whether saving traces the compiled module again.
            default_device: The CUDA device to compile on if the module isn't on one.
            **compile_kwargs: Passed on to ``torch_tensorrt.compile``.

        Returns:
            The compiled module.
        """
        if importlib.util.find_spec("torch_tensorrt") is None:
            raise ModuleNotFoundError(
                f"`{type(self).__name__}.to_tensorrt` needs the package torch_tensorrt: pip install torch-tensorrt"
            )
        if ir == "ts" and file_path is not None and output_format != "torchscript":
            raise ValueError(
                f"TensorRT with ir='ts' only saves output_format='torchscript', but output_format={output_format!r}"
            )
        device = self.device
        if device.type != "cuda":
            target = torch.device(default_device)
            if not torch.cuda.is_available() or target.type != "cuda":
                raise MisconfigurationException(
                    f"TensorRT compiles for CUDA only, but the module is on {device}, and default_device={target} is "
                    "not a CUDA device of this host"
                )
            self.to(target)
        import torch_tensorrt  # pyright: ignore[reportMissingImports]

        try:
            sample = _sample(self, input_sample, "TensorRT", "input_sample")
            sample = copy.deepcopy((sample,) if isinstance(sample, Tensor) else sample)
            with _mode_kept(self), _scripting() if ir == "ts" else nullcontext():
                compiled = torch_tensorrt.compile(module=self.eval(), ir=ir, inputs=sample, **compile_kwargs)
        finally:
            self.to(device)
        if file_path is not None:
            if ir == "ts":
                torch.jit.save(compiled, file_path)
            else:
                torch_tensorrt.save(compiled, file_path, inputs=sample, output_format=output_format, retrace=retrace)
        return compiled


def _sample(module: Any, given: Any, what: str, argument: str) -> Any:
    """The input to export with, on the module's device."""
    sample = module.example_input_array if given is None else given
    if sample is None:
        raise ValueError(
            f"no input for the export to {what}: pass `{argument}`, or set `self.example_input_array` in the module"
        )
    return _to_device(module, sample)


def _to_device(module: Any, batch: Any) -> Any:
    """The batch as the trainer would hand it to the module."""
    batch = module.on_before_batch_transfer(batch, 0)
    batch = module.transfer_batch_to_device(batch, module.device, 0)
    return module.on_after_batch_transfer(batch, 0)


@contextmanager
def _mode_kept(module: Any) -> Iterator[None]:
    mode = module.training
    try:
        yield
    finally:
        module.train(mode)


@contextmanager
def _scripting() -> Iterator[None]:
    ExportMixin._jit_is_scripting = True
    try:
        yield
    finally:
        ExportMixin._jit_is_scripting = False
