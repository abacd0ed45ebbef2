"""What every test runs under: CPU, full float32 matmuls, the reference data where there is some."""

import gc
import os
from collections.abc import Iterator

# Before any test imports JAX. Accelerators are looked at by experiments.check_device.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "float32")

from pathlib import Path

import jax
import pytest

from tests import pitfalls, shards


def data_directory() -> Path | None:
    """The reference data that SPECJAX_DATA names, if it names any."""
    value = os.environ.get("SPECJAX_DATA")
    if not value:
        return None
    path = Path(value)
    if not path.is_dir():
        raise pytest.UsageError(f"SPECJAX_DATA={value} is not a directory: correct it, or leave it unset")
    return path


# A process may hold 65,530 pieces of memory on Linux (vm.max_map_count), and compiled programs have several for each of
# their parts: XLA crashes where there are no more.
MOST_MAPS = 20_000
MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True)
def _compiled_programs_are_let_go() -> Iterator[None]:
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The evaluation sets and reference data; a test that asks for them is skipped where there are none."""
    path = data_directory()
    if path is None:
        pytest.skip("SPECJAX_DATA is not set: the evaluation sets and reference data are needed")
    return path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pitfalls",
        action="store_true",
        help="run nothing: list the pitfalls (PITFALLS.md beside SPECJAX_DATA) that no test is marked for",
    )
    parser.addoption("--shard", default="0/1", help="index/count: run every count-th of the chosen tests")


@pytest.hookimpl(trylast=True)  # behind -m and -k, which choose
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    try:
        index, count = shards.parse(config.option.shard)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    items[:], others = shards.part(items, index, count)
    if others:
        config.hook.pytest_deselected(items=others)


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if not session.config.option.pitfalls:
        return None
    data = data_directory()
    if data is None:
        raise pytest.UsageError("--pitfalls reads PITFALLS.md beside the directory that SPECJAX_DATA names: set it")
    listing = data.resolve().parent / "PITFALLS.md"
    if not listing.is_file():
        raise pytest.UsageError(f"--pitfalls found no {listing}")
    marks = {
        thread: item.nodeid for item in session.items for mark in item.iter_markers("pitfall") for thread in mark.args
    }
    report = pitfalls.coverage(pitfalls.parse(listing.read_text(encoding="utf-8")), marks)
    print("\n" + report.text())
    session.testsfailed = len(report.unguarded) + len(report.unknown)
    return True
