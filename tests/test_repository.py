"""What the documents name exists, what is imported is declared, data is packaged, files stay short."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.test_imports import OPTIONAL, imported, sources

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def tracked() -> list[Path]:
    """The files under version control."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    run = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in run.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def declared() -> dict[str, Any]:
    """The arguments that setup.py gives to setuptools."""
    setuptools = pytest.importorskip("setuptools")
    arguments: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(setuptools, "setup", lambda **given: arguments.update(given))
        runpy.run_path(str(ROOT / "setup.py"))
    return arguments


def distributions(requirements: list[str]) -> set[str]:
    """Normalised names of the packages that requirements ask for."""
    return {re.split(r"[\[<>=!~; ]", line)[0].lower().replace("_", "-") for line in requirements}


def test_what_the_core_imports_is_declared(declared: dict[str, Any]) -> None:
    owners = importlib.metadata.packages_distributions()
    core = distributions(declared["install_requires"])
    found = set()
    for path in sources("specjax", "experiments", "configs"):
        for name in imported(path, ast.parse(path.read_text(encoding="utf-8"))):
            top = name.split(".")[0]
            if top in sys.stdlib_module_names or top in ("specjax", "configs", "experiments", *OPTIONAL):
                continue
            owned = {owner.lower().replace("_", "-") for owner in owners.get(top, [top])}
            if not owned & core:
                found.add(f"{path.relative_to(ROOT)} imports {top}, and no requirement of setup.py brings it")
    assert found == set()


def test_ranges_in_the_core_and_one_torch(declared: dict[str, Any]) -> None:
    assert all(">=" in line and "==" not in line for line in declared["install_requires"])
    extras = declared["extras_require"]
    assert {"cuda13", "tpu", "torch", "wandb", "notebooks", "launch", "test", "dev"} <= set(extras)
    pins = {line for lines in extras.values() for line in lines if line.startswith("torch")}
    assert len(pins) == 1 and "==" in pins.pop()
    assert not {"torch", "wandb"} & distributions(declared["install_requires"])


def test_every_package_is_one_and_says_what_it_is() -> None:
    for directory in sorted({path.parent for path in sources("specjax")}):
        init = directory / "__init__.py"
        assert init.is_file(), f"{directory.relative_to(ROOT)} holds modules and has no __init__.py"
        assert ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))), f"{init} has no docstring"


def test_data_files_are_packaged(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    command += ["build_py", "--build-lib", str(tmp_path / "lib")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    built = tmp_path / "lib" / "specjax"
    ours = ROOT / "specjax"
    data = [path for path in tracked() if ours in path.parents and path.suffix != ".py"]
    missing = [str(path.relative_to(ours)) for path in data if not (built / path.relative_to(ours)).is_file()]
    assert data and missing == []
    assert not (built.parent / "tests").exists() and not (built.parent / "experiments").exists()


def test_files_have_one_subject() -> None:
    paths = sources("specjax", "experiments", "configs", "tests")
    long = {str(path.relative_to(ROOT)): n for path in paths if (n := len(read(str(path)).splitlines())) > 450}
    assert long == {}, "about 400 lines a file at most: split by subject"


def test_no_path_of_a_machine() -> None:
    pattern = re.compile(r"(?<![\w.~$)}-])/(?:work|tmp|root|home)/")
    found = []
    for path in tracked():
        if path.suffix in (".safetensors", ".npz", ".gz", ".png") or path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}, line {number}: {line.strip()[:80]}")
    assert found == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_that_are_named_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", read("Makefile"), flags=re.MULTILINE))
    named = {
        word
        for words in re.findall(r"(?:^|`)make ((?:[a-z][\w-]*)(?: [a-z][\w-]*)*)", read(document), flags=re.MULTILINE)
        for word in words.split()
    }
    assert named and named <= targets


def test_commands_that_are_named_exist() -> None:
    text = "\n".join(read(document) for document in DOCUMENTS) + read("Makefile")
    modules = set(re.findall(r"-m (experiments[.\w]*\w)", text))
    configs = set(re.findall(r"--config=(configs/[\w/]+\.py)", text))
    assert modules and configs
    paths = [module.replace(".", "/") + ".py" for module in modules] + sorted(configs)
    assert [path for path in paths if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_exist(document: str) -> None:
    named = set(re.findall(r"\b((?:specjax|tests|configs|experiments)(?:/\w+)+(?:\.py)?)\b(?!/<)", read(document)))
    named = {name for name in named if f"{name}/<" not in read(document)}
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_names_in_the_first_experiment_exist() -> None:
    import specjax

    block = re.search(r"```python\n(.*?)```", read("README.md"), flags=re.DOTALL)
    assert block is not None
    names = {node.attr for node in ast.walk(ast.parse(block[1])) if is_attribute_of(node, "specjax")}
    assert names and [name for name in names if not hasattr(specjax, name)] == []


def is_attribute_of(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name


def test_methods_the_readme_calls_shipped_are_those_that_are() -> None:
    from specjax import build

    rows = re.findall(r"^\| (`.+?) \|.*\| (shipped|planned) \|$", read("README.md"), flags=re.MULTILINE)
    shipped = {name for names, state in rows if state == "shipped" for name in re.findall(r"`(\w+)`", names)}
    planned = {name for names, state in rows if state == "planned" for name in re.findall(r"`(\w+)`", names)}
    registered = {*build.DRAFTERS, *build.RULES}
    assert shipped == registered
    assert planned.isdisjoint(registered)
