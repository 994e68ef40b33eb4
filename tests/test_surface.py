"""The public names and signatures, frozen in ``tests/surface.txt``.

A change of the surface is a decision, so it shows in a diff. To accept one:

    python tests/test_surface.py > tests/surface.txt
"""

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FROZEN = Path(__file__).with_name("surface.txt")

MODULES = [
    "leyden",
    "leyden.accelerators",
    "leyden.callbacks",
    "leyden.core",
    "leyden.demos.boring_classes",
    "leyden.loggers",
    "leyden.plugins",
    "leyden.plugins.environments",
    "leyden.plugins.io",
    "leyden.plugins.precision",
    "leyden.profilers",
    "leyden.strategies",
    "leyden.utilities",
    "leyden.utilities.types",
]
# Classes that users subclass or call all day: every public member is frozen too.
CLASSES = ["Trainer", "LightningModule", "LightningDataModule", "Callback"]

# In Lightning 2.6, and not in this release: each a name that a later one brings, or, where it says so, none will.
NOT_YET = {
    "lightning.pytorch.accelerators": {"XLAAccelerator"},
    "lightning.pytorch.callbacks": {
        "BackboneFinetuning",
        "BaseFinetuning",
        "BasePredictionWriter",
        "BatchSizeFinder",
        "DeviceStatsMonitor",
        "EMAWeightAveraging",
        "LearningRateFinder",
        "ModelPruning",
        "SpikeDetection",
        "StochasticWeightAveraging",
        "ThroughputMonitor",
        "WeightAveraging",
    },
    "lightning.pytorch.loggers": {
        "CometLogger",
        "LitLogger",  # never: it belongs to one company's service
        "MLFlowLogger",
        "WandbLogger",
    },
    "lightning.pytorch.plugins": {
        "AsyncCheckpointIO",
        "BitsandbytesPrecision",
        "DeepSpeedPrecision",
        "FSDPPrecision",
        "TransformerEnginePrecision",
        "XLACheckpointIO",
        "XLAPrecision",
    },
    "lightning.pytorch.profilers": {"XLAProfiler"},
    "lightning.pytorch.strategies": {
        "DeepSpeedStrategy",
        "FSDPStrategy",
        "ModelParallelStrategy",
        "ParallelStrategy",
    },
    "lightning.pytorch.utilities": {"is_shared_filesystem"},
}


def signature(function: Any) -> str:
    """Names, kinds and defaults of the parameters; annotations are left out, they print differently by version."""
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.default
        if default is not parameter.empty and " at 0x" in repr(default):  # an address is not a fact
            parameter = parameter.replace(default=getattr(default, "__name__", type(default).__name__))
        parameters.append(parameter.replace(annotation=parameter.empty))
    return str(inspect.Signature(parameters))


def described(name: str, value: Any) -> str:
    if inspect.isclass(value):
        constructor = value.__init__
        own = inspect.isfunction(constructor) and not issubclass(value, str | BaseException)
        return f"{name}{signature(constructor)}" if own else name
    return f"{name}{signature(value)}" if inspect.isfunction(value) else name


def members(cls: type) -> dict[str, Any]:
    """The public attributes of ``cls`` that Leyden defines, not those of ``nn.Module`` or ``object``."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("leyden."):
            found.update({name: value for name, value in vars(base).items() if not name.startswith("_")})
    return found


def surface() -> Iterator[str]:
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in sorted(module.__all__):
            if not name.startswith("__"):
                yield f"{module_name}: {described(name, getattr(module, name))}"
    leyden = importlib.import_module("leyden")
    for class_name in CLASSES:
        for name, value in sorted(members(getattr(leyden, class_name)).items()):
            value = getattr(value, "__func__", value)  # class methods and static methods
            if isinstance(value, property):
                yield f"{class_name}.{name}" + (" (settable)" if value.fset else " (read-only)")
            else:
                yield f"{class_name}.{described(name, value)}"


def test_surface_is_as_frozen():
    now, frozen = set(surface()), set(FROZEN.read_text().splitlines())
    gone = "".join(f"\n  - {line}" for line in sorted(frozen - now))
    new = "".join(f"\n  + {line}" for line in sorted(now - frozen))
    assert not gone + new, f"the public surface changed:{gone}{new}\nto accept: see the top of {__file__}"


def test_all_names_exist_and_tell_what_they_are():
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        assert set(module.__all__) <= set(dir(module))
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) and value.__module__.startswith("leyden."):
                assert inspect.getdoc(value), f"{module_name}.{name} has no docstring"


def test_unknown_names_list_close_ones():
    callbacks = importlib.import_module("leyden.callbacks")
    with pytest.raises(AttributeError, match="EarlyStopping"):
        _ = callbacks.EarlyStoping


@pytest.mark.parametrize("package", ["", *(name.removeprefix("lightning.pytorch") for name in NOT_YET)])
def test_packages_have_the_names_of_lightning(package):
    theirs = set(importlib.import_module(f"lightning.pytorch{package}").__all__)
    ours = set(importlib.import_module(f"leyden{package}").__all__)
    not_yet = NOT_YET.get(f"lightning.pytorch{package}", set())
    assert theirs - ours == not_yet


@pytest.mark.parametrize("name", CLASSES)
def test_classes_have_the_members_of_lightning(name):
    theirs = getattr(importlib.import_module("lightning.pytorch"), name)
    ours = getattr(importlib.import_module("leyden"), name)
    public: dict[str, Any] = {}
    for base in reversed(theirs.__mro__):
        if base.__module__.startswith("lightning."):
            public.update({key: value for key, value in vars(base).items() if not key.startswith("_")})
    # Some of the trainer's attributes are made by its constructor.
    subject = ours(accelerator="cpu", logger=False, enable_progress_bar=False) if name == "Trainer" else ours
    missing = sorted(set(public) - set(dir(subject)))
    assert not missing, f"{name} lacks {missing}"
    for key, value in {"__init__": theirs.__init__, **public}.items():
        if inspect.isfunction(value):
            have = inspect.signature(getattr(ours, key)).parameters
            wanted = set(inspect.signature(value).parameters) - {"self", "args", "kwargs"}
            assert wanted <= set(have), f"{name}.{key} lacks the parameters {sorted(wanted - set(have))}"


if __name__ == "__main__":
    print("\n".join(sorted(surface())))
