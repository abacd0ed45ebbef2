"""The program that holds a checkpoint against transformers sees agreement, and sees faults."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from experiments import check_target
from specjax import build
from specjax.checkpoints import load_target
from tests.models import tiny

ROOT = Path(__file__).resolve().parents[2]


def program(directory: Path, workdir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.check_target", f"--config=configs/check_target.py:{directory}"]
    command += [f"--workdir={workdir}", "--config.new_tokens=8", "--config.max_tokens=64", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)


def test_a_good_checkpoint_agrees(tmp_path: Path) -> None:
    directory = tiny.save(tiny.model("qwen2"), tmp_path / "model")
    run = program(directory, tmp_path / "run")
    assert run.returncode == 0, run.stderr
    assert f"{directory} agrees with transformers (tolerance 0.0001)" in " ".join(run.stdout.split())
    content = json.loads((tmp_path / "run" / "check_target.json").read_text())
    assert len(content["rows"]) == 4 and content["meta"]["schema"] == check_target.SCHEMA
    for row in content["rows"]:
        assert row["same_ids"] and row["full"] < 1e-4 and row["cached"] < 1e-4
        assert row["greedy"] in ("equal", "near_tie")
        assert row["perplexity"] == pytest.approx(row["perplexity_transformers"], rel=1e-3)


def test_bad_settings_are_one_line(tmp_path: Path) -> None:
    run = program(tmp_path / "nothing", tmp_path / "run")
    assert run.returncode == 2
    assert run.stderr.startswith("error: no such model:") and len(run.stderr.splitlines()) == 1


def test_faults_are_seen(tmp_path: Path) -> None:
    """A target whose rotary base is off, as a wrong reading of a config would leave it."""
    directory = tiny.save(tiny.model("llama"), tmp_path / "model")
    right = load_target(str(directory))
    rope = dataclasses.replace(right.config.ropes[0], theta=5000.0)
    spoilt = dataclasses.replace(right.config, ropes=(rope,) * 3)
    from specjax.models import graph

    wrong = dataclasses.replace(right, config=spoilt, graph=graph(spoilt)[0])
    config = build.load_config(ROOT / "configs" / "check_target.py", str(directory))
    config.new_tokens = 8
    reference = check_target.Reference(str(directory), right)
    text = config.texts[0]
    ids = right.tokenizer.encode(text)

    def rows(target: Any) -> list[dict[str, Any]]:
        found = [check_target.compare_text(target, reference, text, ids, config)]
        check_target.compare_greedy(target, reference, [ids], found, config)
        return found

    assert check_target.faults(rows(right), 1e-4) == []
    seen = check_target.faults(rows(wrong), 1e-4)
    assert [fault.split(":")[1].split(" differ")[0].strip() for fault in seen[:2]] == [
        "logits of the full pass",
        "logits of the cached pass",
    ]
    doubled = dataclasses.replace(right, params=jax.tree.map(lambda leaf: leaf * 2, right.params))
    assert any("greedy text parts at token" in fault for fault in check_target.faults(rows(doubled), 1e-4))
    other = rows(right)
    other[0]["same_ids"] = False
    assert check_target.faults(other, 1e-4) == ["text 0 is cut into other ids"]
