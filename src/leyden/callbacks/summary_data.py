"""What a model consists of: layers, parameters, sizes, operations; as data and as a table of text."""

import contextlib
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from leyden.base.log import warn_once

if TYPE_CHECKING:
    from leyden.core.module import LightningModule

__all__ = [
    "LayerSummary",
    "ModelSummary",
    "format_summary_table",
    "get_formatted_model_size",
    "get_human_readable_count",
    "parse_batch_shape",
    "summarize",
]

PARAMETER_NUM_UNITS = [" ", "K", "M", "B", "T"]
UNKNOWN_SIZE = "?"
LEFTOVER_PARAMS_NAME = "other params"
NOT_APPLICABLE = "n/a"

# A column of the table: its title and a text per row.
Column = tuple[str, list[str]]


def _count(parameters: Iterable[Tensor], bytes_each: bool = False) -> int:
    total = 0
    for parameter in parameters:
        if isinstance(parameter, UninitializedParameter):
            warn_once(
                "The model summary leaves out lazy parameters, which have no shape before the first forward pass:"
                " set `self.example_input_array` to have one made"
            )
            continue
        total += parameter.numel() * (parameter.element_size() if bytes_each else 1)
    return total


def parse_batch_shape(batch: Any) -> str | list[Any]:
    """Shape of a tensor, shapes in a nested list or tuple, ``"?"`` for all else."""
    if hasattr(batch, "shape"):
        return list(batch.shape)
    if isinstance(batch, (list, tuple)):
        return [parse_batch_shape(item) for item in batch]
    return UNKNOWN_SIZE


class LayerSummary:
    """One layer of the table.

    The shapes are those of the first forward pass while the summary watches the layer; ``"?"`` without one.

    Args:
        module: The layer.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._in_size: str | list[Any] = UNKNOWN_SIZE
        self._out_size: str | list[Any] = UNKNOWN_SIZE
        self._handle: Any = None
        if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
            self._handle = module.register_forward_hook(self._see, with_kwargs=True)

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        inputs = (*args, *kwargs.values())
        self._in_size = parse_batch_shape(inputs[0] if len(inputs) == 1 else inputs)
        self._out_size = parse_batch_shape(out)
        self.detach_hook()

    def detach_hook(self) -> None:
        """Stops watching the layer."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @property
    def in_size(self) -> str | list[Any]:
        """Shape or shapes of the inputs."""
        return self._in_size

    @property
    def out_size(self) -> str | list[Any]:
        """Shape or shapes of the outputs."""
        return self._out_size

    @property
    def layer_type(self) -> str:
        """Name of the class."""
        return type(self._module).__name__

    @property
    def num_parameters(self) -> int:
        """Parameters of the layer and all below it."""
        return _count(self._module.parameters())

    @property
    def training(self) -> bool:
        """Whether the layer is in training mode."""
        return self._module.training


class ModelSummary:
    """Layers of a model with their parameters, and with shapes and FLOPs if it has an ``example_input_array``.

    The example is run through ``forward`` once, in evaluation mode, without gradients and with the state of the random
    generators put back, so that a run with a summary gives the same numbers as one without.

    Args:
        model: The model.
        max_depth: Levels of layers to show: 1 for the direct children, -1 for all, 0 for none.

    Raises:
        ValueError: For a ``max_depth`` below -1.

    Example:
        ``print(ModelSummary(model, max_depth=2))``
    """

    def __init__(self, model: "LightningModule", max_depth: int = 1) -> None:
        if not isinstance(max_depth, int) or max_depth < -1:
            raise ValueError(f"max_depth={max_depth!r} must be -1 (all layers), 0 (none) or the number of levels")
        self._model = model
        self._max_depth = max_depth
        self._flops: dict[str, int] | None = None
        self._layer_summary = self.summarize()

    def summarize(self) -> dict[str, LayerSummary]:
        """Name -> layer; runs the example."""
        layers = {name: LayerSummary(module) for name, module in self.named_modules}
        try:
            if getattr(self._model, "example_input_array", None) is not None:
                self._run_example()
        finally:
            for layer in layers.values():
                layer.detach_hook()
        return layers

    @property
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """The layers that are shown, without the model itself."""
        if self._max_depth == 0:
            return []
        named = [(name, module) for name, module in self._model.named_modules() if name]
        return [item for item in named if self._max_depth == -1 or item[0].count(".") < self._max_depth]

    def _run_example(self) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        model = self._model
        trainer = model._trainer
        inputs = self._example()
        modes = {module: module.training for module in model.modules()}
        counter = FlopCounterMode(display=False, depth=None)  # pyright: ignore[reportArgumentType]
        precision = contextlib.nullcontext() if trainer is None else trainer.precision_plugin.forward_context()
        devices = [model.device] if model.device.type == "cuda" else []
        model.eval()
        try:
            with torch.random.fork_rng(devices), torch.no_grad(), precision, counter:
                if isinstance(inputs, (list, tuple)):
                    model(*inputs)
                elif isinstance(inputs, dict):
                    model(**inputs)
                else:
                    model(inputs)
        finally:
            for module, mode in modes.items():
                module.training = mode
        root = f"{type(model).__name__}."
        counts = counter.get_flop_counts()
        self._flops = {
            name.removeprefix(root): sum(operations.values())
            for name, operations in counts.items()
            if name.startswith(root)
        }
        self._flops[""] = counter.get_total_flops()

    def _example(self) -> Any:
        """The example as a training batch would come: through the transfer hooks, on the model's device."""
        model = self._model
        batch = model.on_before_batch_transfer(model.example_input_array, 0)
        batch = model.transfer_batch_to_device(batch, model.device, 0)
        return model.on_after_batch_transfer(batch, 0)

    @property
    def layer_names(self) -> list[str]:
        """Dotted names."""
        return list(self._layer_summary)

    @property
    def layer_types(self) -> list[str]:
        """Names of the classes."""
        return [layer.layer_type for layer in self._layer_summary.values()]

    @property
    def in_sizes(self) -> list[Any]:
        """Shapes of the inputs."""
        return [layer.in_size for layer in self._layer_summary.values()]

    @property
    def out_sizes(self) -> list[Any]:
        """Shapes of the outputs."""
        return [layer.out_size for layer in self._layer_summary.values()]

    @property
    def param_nums(self) -> list[int]:
        """Parameters per layer shown."""
        return [layer.num_parameters for layer in self._layer_summary.values()]

    @property
    def training_modes(self) -> list[bool]:
        """Whether each layer shown is in training mode."""
        return [layer.training for layer in self._layer_summary.values()]

    @property
    def total_training_modes(self) -> dict[str, int]:
        """How many layers, shown or not, are in ``"train"`` and in ``"eval"`` mode."""
        modes = [module.training for name, module in self._model.named_modules() if name]
        return {"train": sum(modes), "eval": len(modes) - sum(modes)}

    @property
    def total_parameters(self) -> int:
        """Parameters of the model."""
        return _count(self._model.parameters())

    @property
    def trainable_parameters(self) -> int:
        """Parameters that get a gradient."""
        return _count(parameter for parameter in self._model.parameters() if parameter.requires_grad)

    @property
    def total_layer_params(self) -> int:
        """Parameters in the direct children of the model that are shown."""
        return sum(layer.num_parameters for name, layer in self._layer_summary.items() if "." not in name)

    @property
    def model_size(self) -> float:
        """Size of the parameters in megabytes (1e6 bytes), by the types they have now."""
        return _count(self._model.parameters(), bytes_each=True) * 1e-6

    @property
    def total_flops(self) -> int:
        """Floating point operations of one forward pass of the example; 0 without one."""
        return 0 if self._flops is None else self._flops[""]

    @property
    def flop_counts(self) -> dict[str, int]:
        """Floating point operations per layer shown."""
        counted = self._flops or {}
        return {name: counted.get(name, 0) for name in self.layer_names}

    def _get_summary_data(self) -> list[Column]:
        """The columns; shapes and FLOPs only if an example was run."""
        columns: list[Column] = [
            (" ", [str(number) for number in range(len(self._layer_summary))]),
            ("Name", self.layer_names),
            ("Type", self.layer_types),
            ("Params", [get_human_readable_count(count) for count in self.param_nums]),
            ("Mode", ["train" if mode else "eval" for mode in self.training_modes]),
        ]
        if self._flops is not None:
            columns.append(("FLOPs", [get_human_readable_count(count) for count in self.flop_counts.values()]))
            columns.append(("In sizes", [str(size) for size in self.in_sizes]))
            columns.append(("Out sizes", [str(size) for size in self.out_sizes]))
        leftover = self.total_parameters - self.total_layer_params
        if leftover > 0 and self._max_depth != 0:
            known = {" ": " ", "Name": LEFTOVER_PARAMS_NAME, "Params": get_human_readable_count(leftover)}
            for title, texts in columns:
                texts.append(known.get(title, NOT_APPLICABLE))
        return columns

    def __str__(self) -> str:
        return format_summary_table(
            self.total_parameters,
            self.trainable_parameters,
            self.model_size,
            self.total_training_modes,
            self.total_flops,
            *self._get_summary_data(),
        )

    __repr__ = __str__


def totals(
    total_parameters: int,
    trainable_parameters: int,
    model_size: float,
    total_training_modes: dict[str, int],
    total_flops: int,
) -> list[tuple[str, str]]:
    """The lines below the table: number and what it counts. No FLOPs where none were counted."""
    lines = [
        (get_human_readable_count(trainable_parameters), "Trainable params"),
        (get_human_readable_count(total_parameters - trainable_parameters), "Non-trainable params"),
        (get_human_readable_count(total_parameters), "Total params"),
        (get_formatted_model_size(model_size), "Total estimated model params size (MB)"),
        (str(total_training_modes["train"]), "Modules in train mode"),
        (str(total_training_modes["eval"]), "Modules in eval mode"),
    ]
    if total_flops:
        lines.append((get_human_readable_count(total_flops), "Total FLOPs"))
    return lines


def format_summary_table(
    total_parameters: int,
    trainable_parameters: int,
    model_size: float,
    total_training_modes: dict[str, int],
    total_flops: int,
    *columns: Column,
) -> str:
    """The whole summary as text.

    Args:
        total_parameters: Parameters of the model.
        trainable_parameters: Parameters that get a gradient.
        model_size: Megabytes.
        total_training_modes: Layers in ``"train"`` and ``"eval"`` mode.
        total_flops: Operations of one forward pass; 0: unknown.
        *columns: Title and texts of each column.
    """
    widths = [max(map(len, (title, *texts))) for title, texts in columns]
    titles = [title for title, _ in columns]
    rows = zip(*(texts for _, texts in columns), strict=True)
    header, *body = [
        " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in (titles, *rows)
    ]
    rule = "-" * (sum(widths) + 3 * (len(widths) + 1))
    numbers = totals(total_parameters, trainable_parameters, model_size, total_training_modes, total_flops)
    return "\n".join([header, rule, *body, rule, *(f"{number:<10}{what}" for number, what in numbers)])


def get_formatted_model_size(total_model_size: float) -> str:
    """Megabytes with three decimals: ``1234.5`` -> ``"1,234.500"``."""
    return f"{total_model_size:,.3f}"


def get_human_readable_count(number: int) -> str:
    """A count with two or three digits and a unit: ``123`` -> ``"123  "``, ``1234`` -> ``"1.2 K"``.

    Raises:
        ValueError: For a number below 0.
    """
    if number < 0:
        raise ValueError(f"a count can't be negative: {number}")
    digits = int(math.log10(number)) + 1 if number > 0 else 1
    group = min(math.ceil(digits / 3), len(PARAMETER_NUM_UNITS)) - 1
    scaled = number / 1000**group
    if group == 0 or scaled >= 100:
        return f"{int(scaled):,d} {PARAMETER_NUM_UNITS[group]}"
    return f"{scaled:,.1f} {PARAMETER_NUM_UNITS[group]}"


def summarize(lightning_module: "LightningModule", max_depth: int = 1) -> ModelSummary:
    """The summary of a module, attached to a trainer or not.

    Args:
        lightning_module: The module.
        max_depth: Levels of layers to show: 1 for the direct children, -1 for all, 0 for none.
    """
    return ModelSummary(lightning_module, max_depth=max_depth)
