"""The benchmark in two real processes over one target: the counts of one process, written by the first alone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from specjax.checkpoints import save_target
from specjax.testing import tiny_target
from tests.distributed.processes import finish, start_program


def start(folder: Path, run: str, count: int) -> list[subprocess.Popen[str]]:
    arguments = [
        *("--config=configs/quickstart.py:quick", f"--workdir={folder / run}"),
        *(f"--config.target.source={folder / 'target'}", "--config.layout=plain", f"--config.mesh.fsdp={count}"),
        *("--config.only=('autoregressive', 'prompt_lookup')", "--config.prompts=shipped:writing,multi_turn"),
        "--config.max_new_tokens=10",
    ]
    return start_program("benchmark", arguments, count=count, TMPDIR=str(folder / "others"))


@pytest.mark.slow
def test_the_benchmark(tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    save_target(tiny_target(), tmp_path / "target")
    texts = {}
    for run, count in (("one", 1), ("two", 2)):
        done = finish(start(tmp_path, run, count))
        assert [code for code, _, _ in done] == [0] * count, done[-1][2]
        assert ["autoregressive" in out for _, out, _ in done] == [True, False][:count]  # gloo speaks too
        texts[run] = [row["tokens"] for row in json.loads((tmp_path / run / "tokens.json").read_text())["texts"]]
        rows = json.loads((tmp_path / run / "results.json").read_text())["rows"]
        assert all(row["matches_baseline"] for row in rows if row["category"] == "all")
    assert texts["one"] == texts["two"] and len(texts["one"]) > 2
    assert not list((tmp_path / "others").glob("specjax-*"))  # thrown away
