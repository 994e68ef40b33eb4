"""What `import leyden` and its first names load. Modules are counted, not seconds: the same on every machine."""

import json
import subprocess
import sys

# Each of these takes a noticeable part of a second, or is not always installed.
HEAVY = [
    "deepspeed",
    "lightning",
    "ray",
    "rich",
    "scipy",
    "sklearn",
    "sympy",
    "tensorboard",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.onnx",
    "torch.utils.tensorboard",
    "torchmetrics",
    "tqdm",
    "wandb",
    "yaml",
]

NAMES = "import leyden as L; L.Trainer; L.LightningModule; L.LightningDataModule; L.Callback; L.seed_everything"
PACKAGES = "from leyden import accelerators, callbacks, cli, demos, loggers, plugins, profilers, strategies, utilities"


def loaded_by(code: str, before: str = "import torch") -> set[str]:
    """The modules that ``code`` loads in a new process in which ``before`` has run."""
    script = (
        f"import sys, json\n{before}\nold = set(sys.modules)\n{code}\nprint(json.dumps(list(set(sys.modules) - old)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def own(modules: set[str]) -> list[str]:
    return sorted(module for module in modules if module.split(".")[0] == "leyden")


def heavy(modules: set[str]) -> list[str]:
    return sorted(
        module for module in modules if any(module == name or module.startswith(f"{name}.") for name in HEAVY)
    )


def strangers(modules: set[str]) -> list[str]:
    """Top-level packages that are neither Python's nor torch's nor Leyden's."""
    top = {module.split(".")[0] for module in modules}
    return sorted(top - set(sys.stdlib_module_names) - {"leyden", "torch"})


def test_the_package_alone_loads_next_to_nothing():
    modules = loaded_by("import leyden", before="")
    assert "torch" not in modules
    assert not strangers(modules)
    assert len(own(modules)) <= 4, own(modules)


def test_sub_packages_are_lazy():
    modules = loaded_by(PACKAGES, before="")
    assert "torch" not in modules
    assert not strangers(modules)


def test_names_load_nothing_heavy():
    modules = loaded_by(NAMES)
    assert not heavy(modules)
    assert not strangers(modules)
    assert len(own(modules)) <= 90, f"{len(own(modules))} modules of leyden: {own(modules)}"


def test_a_module_loads_no_trainer():
    """A process that only loads a model, e.g. to serve it, pays for neither loops nor strategies."""
    modules = loaded_by("import leyden as L; L.LightningModule")
    assert not [module for module in own(modules) if module.startswith(("leyden.trainer", "leyden.loops"))]
    assert len(own(modules)) <= 25, own(modules)


def test_a_bare_trainer_loads_nothing_heavy():
    make = "import leyden as L; L.Trainer(accelerator='cpu', logger=False, enable_progress_bar=False, barebones=True)"
    assert not heavy(loaded_by(make))


def test_command_line_help_loads_no_torch():
    modules = loaded_by("from leyden.cli.main import _parser; _parser().format_help()", before="")
    assert "torch" not in modules
