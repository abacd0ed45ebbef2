"""Imports point one way, optional packages stay out of the core, and settings stay out of the library."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "specjax"

# A package may import itself and what stands below it; those of one row do not see each other.
LAYERS = (
    ("parallel",),
    ("models",),
    ("checkpoints",),
    ("decoding",),
    ("drafting", "verification"),
    ("training", "evaluation"),
    ("config_files",),
    ("build",),
    ("api",),
    ("__init__",),
)
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}
# Beside the layers: analysis knows no package of ours and serves all; testing is served by all but the top.
OPTIONAL = (
    "torch", "wandb", "optuna", "IPython", "ipykernel", "jupyter_client", "jupytext", "nbclient", "nbformat", "pytest",
    "gcsfs", "submitit", "tensorboardX",
)  # fmt: skip


def sources(*tops: str) -> list[Path]:
    """Every Python file under these directories of the repository."""
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, tree: ast.AST, only_top: bool = False) -> Iterator[str]:
    """Names a file imports, relative ones resolved; with `only_top`, those that importing it imports."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    nodes = top_level(tree) if only_top else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{module}.{alias.name}"


def top_level(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run on import: all but the bodies of functions and of `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from top_level(child)


def unit(name: str) -> str:
    """The part of specjax a dotted name belongs to: a sub-package, `build`, or `__init__` for the rest."""
    parts = name.split(".")
    if len(parts) == 1:
        return "__init__"
    known = parts[1] in LEVEL or parts[1] in ("analysis", "testing")
    return parts[1] if known else "__init__"


def fault(importer: str, imports: str) -> str | None:
    """Why one part of specjax may not import another, or None where it may."""
    if imports == importer:
        return None
    if importer == "analysis":
        return "analysis imports no package of ours"
    if imports == "analysis":
        return None
    if imports == "testing":
        return "nothing in the library imports testing"
    if importer == "testing":
        return "testing does not import build or the top" if imports in ("build", "api", "__init__") else None
    if LEVEL[imports] >= LEVEL[importer]:
        return f"{importer} stands below or beside {imports}"
    return None


def faults(paths: list[Path]) -> list[str]:
    found = []
    for path in paths:
        importer = unit(module_name(path))
        for name in imported(path, ast.parse(path.read_text(encoding="utf-8"))):
            top = name.split(".")[0]
            if top in ("configs", "experiments", "notebooks", "tests"):
                found.append(f"{path.relative_to(ROOT)} imports {name}: nothing in specjax imports {top}")
            elif top == "specjax" and (why := fault(importer, unit(name))):
                found.append(f"{path.relative_to(ROOT)} imports {name}: {why}")
    return found


def test_arrows() -> None:
    assert faults(sources("specjax")) == []


def test_every_part_of_the_library_has_its_place() -> None:
    parts = {path.name for path in LIBRARY.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    parts |= {path.stem for path in LIBRARY.glob("*.py")}
    assert parts <= {*LEVEL, "analysis", "testing", "zoo"}


@pytest.mark.parametrize(
    ("importer", "imports", "allowed"),
    [
        ("decoding", "models", True),
        ("models", "decoding", False),
        ("drafting", "verification", False),
        ("evaluation", "training", False),
        ("evaluation", "analysis", True),
        ("analysis", "models", False),
        ("testing", "evaluation", True),
        ("testing", "build", False),
        ("training", "testing", False),
        ("build", "__init__", False),
        ("__init__", "build", True),
        ("__init__", "analysis", True),
        ("parallel", "parallel", True),
    ],
)
def test_the_arrows_that_are_checked(importer: str, imports: str, allowed: bool) -> None:
    assert (fault(importer, imports) is None) is allowed


def test_imports_are_seen_in_every_form(tmp_path: Path) -> None:
    text = """
import torch.nn as nn
from ..models import decoder
from . import loop
from specjax import build
def f():
    import wandb
if TYPE_CHECKING:
    import nbclient
try:
    import gcsfs
except ImportError:
    pass
"""
    tree = ast.parse(text)
    path = LIBRARY / "decoding" / "made_up.py"
    ours = ["specjax.models.decoder", "specjax.decoding.loop", "specjax.build"]
    assert sorted(imported(path, tree)) == sorted(["torch.nn", *ours, "wandb", "nbclient", "gcsfs"])
    assert sorted(imported(path, tree, only_top=True)) == sorted(["torch.nn", *ours, "gcsfs"])


def test_optional_packages_are_imported_where_they_are_used() -> None:
    """That is inside functions, so that the core works without them."""
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources("specjax", "experiments", "configs")
        for name in imported(path, ast.parse(path.read_text(encoding="utf-8")), only_top=True)
        if name.split(".")[0] in OPTIONAL
    ]
    assert found == []


def test_the_core_imports_without_optional_packages() -> None:
    program = """
import importlib, pkgutil, sys
from importlib.machinery import PathFinder
class Without(PathFinder):  # as if they were not installed
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        missing = name.split(".")[0] in ("torch", "wandb", "tensorboardX")
        return None if missing else super().find_spec(name, path, target)
sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
try:
    import torch
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("torch could still be imported")
import specjax
names = [m.name for m in pkgutil.walk_packages(specjax.__path__, "specjax.") if ".zoo." not in m.name]
for name in names:
    importlib.import_module(name)
import tokenizers, transformers
transformers.PreTrainedTokenizerFast
print(len(names))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[-1]) >= len([path for path in sources("specjax") if path.name != "__init__.py"])


def test_only_build_reads_configs_and_only_start_up_reads_the_environment() -> None:
    """Library code takes frozen dataclasses; flags belong to the programs."""
    found = []
    for path in sources("specjax"):
        tree, where = ast.parse(path.read_text(encoding="utf-8")), str(path.relative_to(ROOT))
        names = set(imported(path, tree))
        configs = unit(module_name(path)) in ("build", "config_files")
        if not configs and any(name.split(".")[0] == "ml_collections" for name in names):
            found.append(f"{where} imports ml_collections")
        if any(name.startswith("absl.") and not name.startswith("absl.logging") for name in names):
            found.append(f"{where} imports absl's flags or app")
        # Clusters announce themselves through the environment, so process start-up has to look there.
        if where != "specjax/parallel/distributed.py":
            found += [
                f"{where}, line {node.lineno} reads the environment"
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            ]
    assert found == []
