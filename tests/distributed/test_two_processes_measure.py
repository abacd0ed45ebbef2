"""The benchmark in two real processes over one target: the counts of one process, written by the first alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specjax.checkpoints import save_target
from specjax.testing import tiny_target
from tests.distributed.test_two_processes import ROOT, free_port
from tests.distributed.test_two_processes_train import finish


def start(folder: Path, run: str, count: int) -> list[subprocess.Popen[str]]:
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_COORDINATOR_ADDRESS")}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "TMPDIR": str(folder / "others")}
    command = [
        *(sys.executable, "-m", "experiments.benchmark", "--config=configs/quickstart.py:quick"),
        *(f"--config.target.source={folder / 'target'}", "--config.layout=plain", f"--config.mesh.fsdp={count}"),
        *("--config.only=('autoregressive', 'prompt_lookup')", "--config.prompts=shipped:writing,multi_turn"),
        *("--config.max_new_tokens=10", f"--workdir={folder / run}"),
    ]
    joined = ["--distributed=explicit", f"--coordinator=127.0.0.1:{free_port()}", f"--num_processes={count}"]
    return [
        subprocess.Popen(
            [*command, *joined, f"--process_id={index}"] if count > 1 else [*command, "--distributed=off"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]


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
