"""Imports only go down the layers, and files and functions stay small enough to read."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "leyden"
FILES = sorted(PACKAGE.rglob("*.py"))

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 75  # without the docstring

# layer -> the layers it may import, besides itself
MAY_IMPORT = {
    "base": set(),
    "dist": {"base"},
    "checkpoint": {"base"},
    "core": {"base"},
    "strategies": {"base", "dist", "checkpoint"},
    "loops": {"base", "dist", "strategies", "core"},
    "callbacks": {"base", "checkpoint", "core"},
    "loggers": {"base"},
    "profilers": {"base"},
    "train": {"base", "dist", "checkpoint"},
    "trainer": {
        "base",
        "dist",
        "checkpoint",
        "core",
        "strategies",
        "loops",
        "callbacks",
        "loggers",
        "profilers",
    },
}
# These are written against the public interface: they may import anything, and no layer imports them.
ON_TOP = {"cli", "accelerators", "demos", "plugins", "utilities"}
# The version, and the lazy names of the package itself.
FREE = {"__about__", "__init__"}

# module -> module: imports that go across, with the reason.
EXCEPTIONS = {
    # load_from_checkpoint is a class method of what users subclass, and reading a file safely is checkpoint's job.
    ("core.loading", "checkpoint.io"),
    ("core.loading", "checkpoint.schema"),
}
# The orchestrator's two bridges are written for scripts that use the framework: they may use what users may.
BRIDGES = {"train.legacy": {"__init__", "callbacks", "core", "strategies"}, "train.lightning": {"core", "strategies"}}


def module_name(path: Path) -> str:
    """``core/hooks.py`` -> ``core.hooks``; a package's own file is ``core.__init__``."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def layer_of(module: str) -> str:
    return module.split(".")[0]


MODULES = {module_name(path): path for path in FILES}


def resolve(target: str) -> str:
    """The file, as in `module_name`, that importing ``leyden.<target>`` runs; "" when there is none."""
    if f"{target}.__init__" in MODULES:
        return f"{target}.__init__"
    return target if target in MODULES else ""


def imported(node: ast.AST) -> Iterator[str]:
    """The modules of leyden that ``node`` imports, or names in a string that `import_from` and its like will import."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        inside = [f"{base}.{alias.name}" for alias in node.names]
        modules = [name for name in inside if resolve(name[len("leyden.") :])]
        # `from leyden.core import hooks` is an import of the module; of the package too when it has other names as well
        names = modules if len(modules) == len(inside) else [base, *modules]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        match = re.fullmatch(r"(leyden(?:\.\w+)+)(?::\w+)?", node.value)
        names = [match[1]] if match else []
    else:
        return
    for name in names:
        if name == "leyden":
            yield "__init__"
        elif name.startswith("leyden."):
            found = resolve(name[len("leyden.") :])
            if found:
                yield found


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def walk(node: ast.AST, into_functions: bool = True) -> Iterator[ast.AST]:
    """All nodes below ``node`` except those that only the type checker sees."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        if not into_functions and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield child
        yield from walk(child, into_functions)


def imports_of(path: Path) -> set[str]:
    """Everything that ``path`` imports or names for import, at the top, inside functions and in tables."""
    return {target for node in walk(ast.parse(path.read_text())) for target in imported(node)}


def imports_at_load(path: Path) -> set[str]:
    """What is imported as soon as ``path`` is; names in tables are imported later, on use."""
    found = set()
    for node in walk(ast.parse(path.read_text()), into_functions=False):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.update(imported(node))
    return found


def test_every_module_is_in_a_layer():
    known = {*MAY_IMPORT, *ON_TOP, *FREE}
    unknown = sorted(module for module in MODULES if layer_of(module) not in known)
    assert not unknown, f"not in a layer: {unknown}; add them to MAY_IMPORT or ON_TOP, and to ARCHITECTURE.md"


def test_layers_are_acyclic():
    """What the table allows is itself an order: nothing may, by any path, import itself."""

    def below(layer: str) -> set[str]:
        return MAY_IMPORT[layer].union(*(below(lower) for lower in MAY_IMPORT[layer]))

    for layer in MAY_IMPORT:
        assert layer not in below(layer)


def test_imports_go_down():
    wrong = []
    for module, path in MODULES.items():
        layer = layer_of(module)
        if layer not in MAY_IMPORT:
            continue
        allowed = {layer, "__about__", *MAY_IMPORT[layer]}
        wrong += [
            f"leyden.{module} ({layer}) imports leyden.{target}; {layer} may import {sorted(MAY_IMPORT[layer])}"
            for target in sorted(imports_of(path))
            if layer_of(target) not in allowed | BRIDGES.get(module, set()) and (module, target) not in EXCEPTIONS
        ]
    assert not wrong, "\n".join(wrong)


def test_exceptions_are_needed():
    stale = [
        pair for pair in sorted(EXCEPTIONS) if pair[0] not in MODULES or pair[1] not in imports_of(MODULES[pair[0]])
    ]
    assert not stale, f"no longer imported, so no longer an exception: {stale}"


def test_no_import_cycles():
    """No module needs, while it is being imported, one that is being imported already."""
    graph = {module: imports_at_load(path) - {module} for module, path in MODULES.items()}
    # Importing a.b runs a/__init__ first, so that is an edge too.
    for targets in graph.values():
        for target in list(targets):
            parts = target.split(".")[:-1]
            targets.update(".".join([*parts[:end], "__init__"]) for end in range(len(parts) + 1))
    for module in graph:
        graph[module] = {target for target in graph[module] if target in MODULES and target != module}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            cycle = [*path[path.index(module) :], module]
            pytest.fail(f"import cycle: {' -> '.join(cycle)}")
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_sizes():
    wrong = []
    for module, path in MODULES.items():
        text = path.read_text()
        lines = text.count("\n")
        if lines > MAX_FILE_LINES:
            wrong.append(f"{module} has {lines} lines, at most {MAX_FILE_LINES}: split it")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = length(node)
                if lines > MAX_FUNCTION_LINES:
                    wrong.append(f"{module}.{node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}: split it")
    assert not wrong, "\n".join(wrong)


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from ``def`` to the end, without the docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        lines -= function.body[0].end_lineno - function.body[0].lineno + 1
    return lines


def test_source_is_ascii():
    wrong = [module for module, path in MODULES.items() if not path.read_bytes().isascii()]
    assert not wrong, f"characters outside ASCII in {wrong}"


def test_the_checks_see_what_they_should(tmp_path):
    """The reader of imports finds every form of import, and leaves out what only the type checker sees."""
    source = tmp_path / "sample.py"
    source.write_text(
        "import leyden.base.log\n"
        "from leyden.core import hooks\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from leyden.trainer.trainer import Trainer\n"
        "def f():\n    from leyden.loggers.base import Logger\n"
        "TABLE = {'ddp': 'leyden.strategies.ddp:DDPStrategy'}\n"
    )
    at_load = {"base.log", "core.hooks"}
    assert imports_at_load(source) == at_load
    assert imports_of(source) == {*at_load, "loggers.base", "strategies.ddp"}
