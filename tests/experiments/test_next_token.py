"""The next token's loss of pretrained targets: by row, and compared over runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments import _next_token, next_token
from specjax import build
from specjax.models import merge
from specjax.testing import tiny_target
from specjax.training.data import Document, TextRows, lay_out


def test_rows_lose_what_their_own_documents_lose() -> None:
    target, rng = tiny_target(width=16, layers=1), np.random.default_rng(0)
    rows = [[Document(rng.integers(0, 200, n).astype(np.int32), 0) for n in sizes] for sizes in ((5, 9), (16,), (3,))]
    found = _next_token.losses_by_row(target, TextRows(lay_out(rows, 16)), batch=2)
    assert found[:, 1].tolist() == [12, 15, 2]
    network = merge(target.graph, target.params)
    for row, (nats, _) in zip(rows, found, strict=True):
        expected = 0.0
        for document in row:
            ids = document.tokens[None]
            positions = np.arange(ids.shape[1])[None]
            taps = network.full(ids, positions, np.ones_like(ids), taps=("normed",)).taps
            law = np.asarray(jax.nn.log_softmax(network.logits(taps["normed"]), -1))[0]
            expected -= law[np.arange(ids.shape[1] - 1), ids[0, 1:]].sum()
        assert nats == pytest.approx(expected, rel=1e-5)


def run(folder: Path, heads: int, seed: int, nats: np.ndarray, **changes: Any) -> str:
    row = {"set": "code", "kind": "independent", "heads": heads, "seed": seed, "steps": 10}
    row |= {"by_row": [[float(n), 100] for n in nats], **changes}
    directory = folder / f"{row['kind']}-{heads}-{seed}"
    directory.mkdir()
    (directory / "results.json").write_text(json.dumps({"meta": {"schema": _next_token.SCHEMA}, "rows": [row]}))
    return str(directory)


def test_heads_are_compared_with_one_row_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows differ by far more than models do: only pairs of rows show a hundredth of a nat."""
    rng = np.random.default_rng(0)
    rows = rng.normal(300, 60, 40)
    one = [rows + rng.normal(0, 1, 40) for _ in range(2)]
    runs = [run(tmp_path, 1, seed, nats) for seed, nats in enumerate(one)]
    runs += [run(tmp_path, 2, seed, rows - 5 + rng.normal(0, 1, 40)) for seed in (0, 1)]
    runs += [run(tmp_path, 4, seed, rows + 5 + rng.normal(0, 1, 40)) for seed in (0, 2)]
    runs.append(run(tmp_path, 2, 0, one[0] + np.tile([1, -1], 20), kind="sequential"))
    next_token.main(runs)
    lines = {line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines() if "│" in line}
    assert "better" in lines["2 (independent)"] and "-0.05" in lines["2 (independent)"]
    assert "worse" in lines["4 (independent)"] and "no difference shown" in lines["2 (sequential)"]
    assert lines["1"].split("│")[2].strip() == "2"


def test_seeds_that_disagree_widen_the_interval() -> None:
    """Rows that agree within each seed say nothing about the next seed."""
    counts = np.full(50, 100.0)
    base = {seed: np.stack([np.full(50, 300.0), counts], axis=1) for seed in range(3)}
    apart = {seed: base[seed] - [[less, 0.0]] for seed, less in enumerate((9.0, 1.0, -1.0))}
    alike = {seed: base[seed] - [[3.0, 0.0]] for seed in range(3)}
    wide, narrow = next_token.difference(apart, base), next_token.difference(alike, base)
    assert wide.estimate == pytest.approx(-0.03) == narrow.estimate
    assert narrow.high - narrow.low < 1e-9 and wide.low < -0.07 and wide.high > 0.01
    one = next_token.difference({0: apart[0]}, base)
    assert one.low == pytest.approx(-0.09) == one.high


def test_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    rows = np.full(4, 300.0)
    two = run(tmp_path, 2, 0, rows)
    with pytest.raises(ValueError, match="no run with heads=1 among these, on 'code'"):
        next_token.main([two])
    one = run(tmp_path, 1, 1, rows)
    with pytest.raises(ValueError, match=r"seeds \[0\] and \[1\] have none in common"):
        next_token.main([one, two])
    with pytest.raises(ValueError, match="two runs with heads=2, kind=independent, seed=0"):
        next_token.main([one, two, two])
    with pytest.raises(ValueError, match=r"differ in held-out text or steps \(20 and 10\)"):
        next_token.main([one, run(tmp_path, 4, 1, rows, steps=20)])
    with pytest.raises(FileNotFoundError, match=r"no .*never.results.json; expected the directory of a finished run"):
        next_token.main([str(tmp_path / "never")])


def test_the_sweep_has_one_head_to_compare_with() -> None:
    module, arg = build.config_module("configs/mtp.py:small")
    assert module.sweep(arg) == {"objective.heads": (1, 2, 4), "train.seed": (0, 1, 2)}
    assert module.sweep("small,kind=sequential")["objective.heads"] == (2, 4)
