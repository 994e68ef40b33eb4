"""`LightningTrainer` and `LightningConfigBuilder` of Ray 2.4 to 2.7, for scripts that still use them."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from leyden.base.errors import MisconfigurationException, raise_all
from leyden.base.log import rank_zero_deprecation, rank_zero_warn
from leyden.callbacks.checkpoint import ModelCheckpoint
from leyden.core.module import LightningModule
from leyden.strategies.ddp import DDPStrategy
from leyden.train.artifacts import Checkpoint, Result
from leyden.train.config import CheckpointConfig, RunConfig, ScalingConfig
from leyden.train.lightning import RayDeepSpeedStrategy, RayFSDPStrategy
from leyden.train.trainer import TorchConfig, TorchTrainer

__all__ = ["LightningCheckpoint", "LightningConfigBuilder", "LightningTrainer"]

_NEW_FORM = """{name} is deprecated. Write the training as a function, which shows what happens and can do anything:

    def train_func():
        model = MyLightningModule(...)
        trainer = leyden.Trainer(devices="auto", accelerator="auto", callbacks=[ModelCheckpoint(...)])
        trainer.fit(model, datamodule=...)

    result = leyden.train.torch.TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=4)).fit()
    with result.checkpoint.as_directory() as folder:
        model = MyLightningModule.load_from_checkpoint(os.path.join(folder, "checkpoint.ckpt"))
"""

_FILE = "checkpoint.ckpt"
_STRATEGIES = {"ddp": DDPStrategy, "fsdp": RayFSDPStrategy, "deepspeed": RayDeepSpeedStrategy}


class LightningCheckpoint(Checkpoint):
    """A checkpoint of a `LightningTrainer`: it can make the model."""

    def get_model(self, model_class: type[LightningModule], **load_from_checkpoint_kwargs: Any) -> Any:
        """Builds a module with the weights of this checkpoint.

        Args:
            model_class: The class of the module.
            **load_from_checkpoint_kwargs: For ``model_class.load_from_checkpoint``: ``map_location``, ``strict``, and
                arguments of the class that it did not save by ``save_hyperparameters``.
        """
        if isinstance(model_class, LightningModule) or not hasattr(model_class, "load_from_checkpoint"):
            raise TypeError(f"get_model takes the class of a LightningModule, but this is {model_class!r}")
        with self.as_directory() as folder:
            return model_class.load_from_checkpoint(os.path.join(folder, _FILE), **load_from_checkpoint_kwargs)


class LightningConfigBuilder:
    """Collects what a `LightningTrainer` needs. Every call returns the builder; `build` checks it all."""

    def __init__(self) -> None:
        rank_zero_deprecation(_NEW_FORM.format(name="LightningConfigBuilder"))
        self._module_class: Any = None
        self._parts: dict[str, dict[str, Any]] = {"module": {}, "trainer": {}, "fit": {}, "checkpoint": {}}
        self._strategy: tuple[str, dict[str, Any]] = ("ddp", {})

    def module(self, cls: type[LightningModule] | None = None, **kwargs: Any) -> LightningConfigBuilder:
        """The class of the module, and the arguments it is built with."""
        self._module_class = cls
        self._parts["module"].update(kwargs)
        return self

    def trainer(self, **kwargs: Any) -> LightningConfigBuilder:
        """Arguments of the Trainer."""
        self._parts["trainer"].update(kwargs)
        return self

    def fit_params(self, **kwargs: Any) -> LightningConfigBuilder:
        """Arguments of ``Trainer.fit``: ``datamodule``, ``train_dataloaders``, ``val_dataloaders``, ``ckpt_path``."""
        self._parts["fit"].update(kwargs)
        return self

    def strategy(self, name: str = "ddp", **kwargs: Any) -> LightningConfigBuilder:
        """``"ddp"``, with arguments of `DDPStrategy`; ``"fsdp"`` and ``"deepspeed"`` are not in this version.

        Raises:
            ValueError: The name is none of these.
        """
        if name not in _STRATEGIES:
            raise ValueError(f"strategy({name!r}) is unknown; use one of {sorted(_STRATEGIES)}")
        self._strategy = (name, kwargs)
        return self

    def checkpointing(self, **kwargs: Any) -> LightningConfigBuilder:
        """Arguments of `ModelCheckpoint`; whatever it saves is reported."""
        self._parts["checkpoint"].update(kwargs)
        return self

    def build(self) -> dict[str, Any]:
        """All that was collected, as a plain dictionary.

        Raises:
            MisconfigurationException: The module is no class of a LightningModule, or a trainer argument can't work.
        """
        problems = []
        if self._module_class is None:
            problems.append("module(cls=...) is missing: which LightningModule is to be trained")
        elif not isinstance(self._module_class, type) or not issubclass(self._module_class, LightningModule):
            problems.append(f"module(cls={self._module_class!r}) must be a class, a subclass of LightningModule")
        accelerator = self._parts["trainer"].get("accelerator", "auto")
        if accelerator not in ("auto", "cpu", "gpu", "cuda"):
            problems.append(f"trainer(accelerator={accelerator!r}) must be 'cpu', 'gpu' or 'auto'")
        raise_all(problems, "LightningConfigBuilder.build()")
        trainer, fit = dict(self._parts["trainer"]), dict(self._parts["fit"])
        for what, given, name, way_out in (
            ("trainer", trainer, "strategy", "use LightningConfigBuilder.strategy(...)"),
            ("trainer", trainer, "devices", "ScalingConfig decides on the devices"),
            ("fit_params", fit, "model", "use LightningConfigBuilder.module(...)"),
        ):
            if given.pop(name, None) is not None:
                rank_zero_warn(f"LightningConfigBuilder.{what}({name}=...) is ignored: {way_out}")
        return {
            "module_class": self._module_class,
            "module": dict(self._parts["module"]),
            "trainer": trainer,
            "fit": fit,
            "strategy": self._strategy,
            "checkpoint": dict(self._parts["checkpoint"]),
        }


def _train(config: Mapping[str, Any]) -> None:
    """The training function of every worker."""
    import leyden

    settings = copy.copy(config["trainer"])
    name, options = config["strategy"]
    callbacks = settings.pop("callbacks", None) or []
    callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    if settings.get("enable_checkpointing") is not False:
        callbacks.append(ModelCheckpoint(**{**config["checkpoint"], "save_last": True}))
    trainer = leyden.Trainer(**settings, devices="auto", callbacks=callbacks, strategy=_STRATEGIES[name](**options))
    trainer.fit(config["module_class"](**config["module"]), **config["fit"])


class LightningTrainer(TorchTrainer):
    """Trains what a `LightningConfigBuilder` describes, in a training function of its own.

    Where ``run_config`` says nothing of checkpoints, ``checkpointing(monitor=..., mode=..., save_top_k=...)`` decides
    which of them are kept in the run's folder too.

    Args:
        lightning_config: From `LightningConfigBuilder.build`.
        torch_config: See `TorchTrainer`.
        scaling_config: See `TorchTrainer`.
        run_config: See `TorchTrainer`.
        datasets: Not supported with the builder, as the arguments after it: pass loaders or a datamodule to
            ``fit_params``.

    Raises:
        MisconfigurationException: Unsupported arguments were given.
    """

    def __init__(
        self,
        lightning_config: Mapping[str, Any],
        *,
        torch_config: TorchConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        dataset_config: Any = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        datasets_iter_config: Mapping[str, Any] | None = None,
        preprocessor: Any = None,
        resume_from_checkpoint: Checkpoint | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        rank_zero_deprecation(_NEW_FORM.format(name="LightningTrainer"))
        given = {
            "dataset_config": dataset_config,
            "datasets": datasets,
            "datasets_iter_config": datasets_iter_config,
            "preprocessor": preprocessor,
            "metadata": metadata,
        }
        unsupported = sorted(name for name, value in given.items() if value)
        if unsupported:
            raise MisconfigurationException(
                f"LightningTrainer({', '.join(f'{name}=...' for name in unsupported)}): give loaders or a datamodule "
                "to LightningConfigBuilder.fit_params(...), or write a training function for TorchTrainer, which takes "
                "datasets"
            )
        config = dict(lightning_config)
        if resume_from_checkpoint is not None and not config["fit"].get("ckpt_path"):
            folder = resume_from_checkpoint.to_directory()
            config["fit"] = {**config["fit"], "ckpt_path": os.path.join(folder, _FILE)}
        super().__init__(
            _train,
            train_loop_config=config,
            torch_config=torch_config,
            scaling_config=scaling_config,
            run_config=_with_retention(run_config, config["checkpoint"]),
        )

    def fit(self) -> Result:
        """Runs the training; the checkpoints of the result have `LightningCheckpoint.get_model`."""
        result = super().fit()
        best = [(_as_lightning(checkpoint), metrics) for checkpoint, metrics in result.best_checkpoints]
        return dataclasses.replace(result, checkpoint=_as_lightning(result.checkpoint), best_checkpoints=best)


def _as_lightning(checkpoint: Any) -> Any:
    if checkpoint is None:
        return None
    made = copy.copy(checkpoint)
    made.__class__ = LightningCheckpoint
    return made


def _with_retention(run_config: RunConfig | None, checkpoint: Mapping[str, Any]) -> RunConfig:
    """The run's configuration, with `ModelCheckpoint`'s choice of what to keep where it makes none."""
    run_config = copy.copy(run_config) if run_config is not None else RunConfig()
    present = run_config.checkpoint_config
    if present is not None and (present.num_to_keep is not None or present.checkpoint_score_attribute is not None):
        return run_config
    top_k = checkpoint.get("save_top_k", 1)
    run_config.checkpoint_config = CheckpointConfig(
        num_to_keep=None if top_k == -1 else max(1, top_k),
        checkpoint_score_attribute=checkpoint.get("monitor"),
        checkpoint_score_order=checkpoint.get("mode", "min"),
    )
    return run_config
