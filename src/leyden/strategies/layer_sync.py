"""Layers whose statistics span all processes, e.g. batch norm over the global batch."""

from abc import ABC, abstractmethod

from torch import nn

__all__ = ["LayerSync", "TorchSyncBatchNorm"]


class LayerSync(ABC):
    """Replaces layers by synchronising ones when training starts, and puts the plain ones back when it ends."""

    @abstractmethod
    def apply(self, model: nn.Module) -> nn.Module:
        """Returns ``model`` with its layers replaced."""

    @abstractmethod
    def revert(self, model: nn.Module) -> nn.Module:
        """Undoes `apply`."""


class TorchSyncBatchNorm(LayerSync):
    """``torch.nn.SyncBatchNorm`` for all batch norms; parameters, buffers and state_dict keys stay the same."""

    def __init__(self) -> None:
        self._replaced: dict[nn.Module, type[nn.Module]] = {}

    def apply(self, model: nn.Module) -> nn.Module:
        """Replaces each batch norm layer and remembers its class."""
        before = {name: type(module) for name, module in model.named_modules() if _is_batch_norm(module)}
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        after = dict(model.named_modules())
        self._replaced = {after[name]: cls for name, cls in before.items()}
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Puts layers of the remembered classes back, with the trained parameters and statistics."""
        if model in self._replaced:
            model = self._plain(model)
        for parent in list(model.modules()):
            for name, child in parent.named_children():
                if child in self._replaced:
                    setattr(parent, name, self._plain(child))
        self._replaced = {}
        return model

    def _plain(self, layer: nn.Module) -> nn.Module:
        # Same attributes, other class: a new layer would need to repeat every constructor argument of every subclass.
        plain = self._replaced[layer].__new__(self._replaced[layer])
        plain.__dict__.update({key: value for key, value in vars(layer).items() if key != "process_group"})
        return plain


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
