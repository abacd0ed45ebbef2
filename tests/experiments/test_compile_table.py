"""The table of compiled programs: which there are, and how a row reads."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from configs.compile_for import DRAFTERS
from experiments import compile_table
from specjax import build
from specjax.parallel.slices import GIB

SLICES = ["v5e-16x16", "v6e-16x16", "v5p-4x4x4"]
NAMES = ["chain-8b-v5e-16x16", "train-8b-v5p-4x4x4"]


def compiled(runs: Path, name: str, **changes: Any) -> None:
    """What `compile_for` leaves of a program."""
    (program,) = compile_table.chosen_of([name])
    overrides = [word.removeprefix("--") for word in program.more]
    config = build.load_config(program.config, overrides=overrides).to_dict()
    row = {
        "arguments": 3 * GIB,
        "temporaries": GIB // 4,
        "peak": 4 * GIB,
        "memory": 16 * GIB,
        "fits": True,
        "moved_ratio": 1.25,
        "accessed_ratio": 2.0,
        "collectives": {"all-reduce": [65, 25_560_000]},
        "cache_copies": [],
    }
    found = {"meta": {"config": config}, "rows": [{"program": "bare forward pass"}, row | changes]}
    (runs / name).mkdir(parents=True)
    (runs / name / compile_table.FOUND).write_text(json.dumps(found, default=list))


def test_every_drafter_and_every_slice_is_there() -> None:
    names = [program.name for program in compile_table.programs()]
    assert len(names) == len(set(names)) and {f"drafter-{name}" for name in DRAFTERS} <= set(names)
    for kind in ("chain-8b", "tree-8b", "train-8b", "chain-70b", "tree-70b"):
        assert [name.removeprefix(f"{kind}-") for name in names if name.startswith(f"{kind}-")] == SLICES
    # Their settings are fields that the configs have.
    for program in compile_table.programs():
        build.load_config(program.config, overrides=[word.removeprefix("--") for word in program.more])


def test_the_table_of_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled(tmp_path, NAMES[0], cache_copies=["copy"])
    compiled(tmp_path, NAMES[1], fits=False, peak=24 * GIB)
    started: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    more = [f"--runs={tmp_path}", f"--out={tmp_path}/table.md"]
    assert compile_table.main([*NAMES, *more]) == 0 and not started
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert "chain-8b-v6e-16x16, " in lines[-1] and NAMES[0] not in lines[-1]
    assert lines[-4:-2] == [
        "| llama3_8b, decode eagle3, chain of 5, 256 rows | v5e:16x16 | data=rest tensor=8 | 3.00 | 0.25 | 25% "
        "| 1.25 x (2.00 x) | 65 all-reduce (25.6 MB) | 1 |",
        "| llama3_8b, train eagle3, 256 rows | v5p:4x4x4 | fsdp=rest | 3.00 | 0.25 | 150% **does not fit** |  "
        "| 65 all-reduce (25.6 MB) |  |",
    ]
    assert compile_table.main(["train-8b", *more]) == 1 and len(started) == 2
    assert "failed: train-8b-v5e-16x16, train-8b-v6e-16x16" in capsys.readouterr().err


def test_a_run_that_counted_other_bytes(tmp_path: Path) -> None:
    compiled(tmp_path, NAMES[0])
    place = tmp_path / NAMES[0] / compile_table.FOUND
    found = json.loads(place.read_text())
    del found["rows"][-1]["moved_ratio"]
    place.write_text(json.dumps(found))
    with pytest.raises(ValueError, match="is of an older version, which counted other bytes: remove its directory"):
        compile_table.write_table(tmp_path, tmp_path / "table.md")


def test_what_is_asked_for_wrongly(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no program 'chian'; there are chain-8b-v5e-16x16, "):
        compile_table.main(["chian"])
    with pytest.raises(ValueError, match="--minutes=-1; expected at least 0"):
        compile_table.main(["--minutes=-1"])
