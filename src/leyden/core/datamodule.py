"""LightningDataModule: data sets, their preparation and their loaders, in one object that is apart from the model."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Sized
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from typing_extensions import Self

from leyden.base.errors import MisconfigurationException
from leyden.base.tree import apply_to_collection
from leyden.core.hook_methods import DataHooks
from leyden.core.hparams import HyperparametersMixin
from leyden.core.loading import class_only, load_datamodule

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer

__all__ = ["LightningDataModule"]


class LightningDataModule(DataHooks, HyperparametersMixin):
    """Where the data of a run comes from; pass it as ``trainer.fit(model, datamodule=...)``.

    Example:
        class Digits(LightningDataModule):
            def __init__(self, batch_size: int = 32):
                super().__init__()
                self.save_hyperparameters()

            def prepare_data(self):
                download()

            def setup(self, stage):
                self.train, self.val = random_split(load(), [0.9, 0.1])

            def train_dataloader(self):
                return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

            def val_dataloader(self):
                return DataLoader(self.val, batch_size=self.hparams.batch_size)
    """

    #: A name for the data, for whoever wants to show one.
    name: str | None = None
    #: The trainer that this datamodule is in, or None.
    trainer: Trainer | None = None

    CHECKPOINT_HYPER_PARAMS_KEY = "datamodule_hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "datamodule_hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "datamodule_hparams_type"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Dataset | Iterable[Dataset] | None = None,
        val_dataset: Dataset | Iterable[Dataset] | None = None,
        test_dataset: Dataset | Iterable[Dataset] | None = None,
        predict_dataset: Dataset | Iterable[Dataset] | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> Self:
        """Makes a datamodule from data sets alone, or from nested collections of them.

        Args:
            train_dataset: Shuffled, unless it is an ``IterableDataset``.
            val_dataset: Not shuffled.
            test_dataset: Not shuffled.
            predict_dataset: Not shuffled.
            batch_size: The samples in a batch.
            num_workers: The loader processes per data set; 0 loads in this process.
            **datamodule_kwargs: Arguments of the class's ``__init__``; it also gets the two above if it takes them.
        """
        parameters = inspect.signature(cls.__init__).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        options = {"batch_size": batch_size, "num_workers": num_workers}
        passed = {name: value for name, value in options.items() if takes_all or name in parameters}
        datamodule = cls(**datamodule_kwargs, **passed)
        for name, dataset, shuffle in (
            ("train", train_dataset, True),
            ("val", val_dataset, False),
            ("test", test_dataset, False),
            ("predict", predict_dataset, False),
        ):
            if dataset is not None:
                setattr(datamodule, f"{name}_dataloader", partial(_loaders, dataset, shuffle, options))
        return datamodule

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this datamodule; empty for nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when the run is ended by ``exception``."""

    @class_only
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Creates the datamodule with the hyperparameters in a checkpoint, and loads its state.

        Args:
            checkpoint_path: A path, an fsspec URL, or an open binary file.
            map_location: Where tensors go, as in ``torch.load``.
            hparams_file: A ``.yaml`` or ``.csv`` file with hyperparameters to use in place of the checkpoint's.
            weights_only: False also loads a file that names code to run; only for files that you trust. Default: True.
            **kwargs: Arguments of ``__init__``, over those in the checkpoint.

        Raises:
            UnsafeCheckpointError: The file needs more than plain values, and ``weights_only`` isn't False.
            TypeError: ``__init__`` needs an argument that is not in the file; or this was called on an instance.
        """
        return load_datamodule(cls, checkpoint_path, map_location, hparams_file, weights_only, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """The datamodule without its trainer, which belongs to the process."""
        return {**self.__dict__, "trainer": None}

    def __str__(self) -> str:
        """The sizes of the data sets, one line per hook; calls the hooks."""
        rows = (("Train", "train"), ("Validation", "val"), ("Test", "test"), ("Predict", "predict"))
        return os.linesep.join(f"{{{title} dataloader: {self._sizes(f'{name}_dataloader')}}}" for title, name in rows)

    def _sizes(self, hook: str) -> str:
        try:
            loaders = getattr(self, hook)()
        except MisconfigurationException:  # not defined
            return "None"
        except Exception as error:
            # Printing must not fail; often `setup` was not called yet.
            return f"not available ({type(error).__name__})"
        if loaders is None or isinstance(loaders, DataLoader):
            return "None" if loaders is None else _size(loaders)
        sizes: list[str] = []
        apply_to_collection(loaders, DataLoader, lambda loader: sizes.append(_size(loader)))
        return " ; ".join(f"{number}. {size}" for number, size in enumerate(sizes, 1)) or type(loaders).__name__


def _size(loader: DataLoader) -> str:
    return f"size={len(loader.dataset)}" if isinstance(loader.dataset, Sized) else "size=NA"


# Functions of the file and not closures: a datamodule must survive pickling into spawned processes.
def _loaders(dataset: Any, shuffle: bool, options: dict[str, Any]) -> Any:
    return apply_to_collection(dataset, Dataset, _loader, shuffle=shuffle, **options)


def _loader(dataset: Dataset, shuffle: bool, batch_size: int, num_workers: int) -> DataLoader:
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=shuffle and not isinstance(dataset, IterableDataset),
        num_workers=num_workers,
        pin_memory=torch.accelerator.is_available(),
    )
