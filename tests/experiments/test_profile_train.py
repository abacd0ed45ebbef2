"""Training steps measured, and the same steps in torch: they must be the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import profile_train
from specjax import build

TINY = {
    "draft_vocab": 16,
    "batch": 2,
    "row_length": 24,
    "steps": 2,
    "objectives.distill.layers": (0,),
    "objectives.distill.intermediate_size": 24,
    "objectives.eagle3.taps": (0,),
    "objectives.eagle3.intermediate_size": 24,
    "objectives.medusa.num_heads": 3,
    "objectives.hydra.num_heads": 3,
    "objectives.hydra.num_layers": 2,
    "objectives.hydra.embed_rank": 8,
    "objectives.eagle.intermediate_size": 24,
    "objectives.eagle.noise": 0.0,  # drawn: no two frameworks draw alike
}


def config(tiny: Path, **more: object):
    return build.load_config("configs/profile_train.py", f"{tiny}/target", TINY | more)


@pytest.mark.slow
def test_ours_and_torchs_steps_are_the_same(tiny: Path, in_workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    names = ("distill", "eagle", "eagle3", "hydra", "medusa")
    norms = ("fc_norm", "norm_before_residual", "norm_output")
    profile_train.main(
        config(tiny, only=names, **{"objectives.eagle3.norms": norms, "objectives.eagle3.own_head": True})
    )
    found = json.loads((in_workdir / "results.json").read_text())
    rows = {(row["objective"], row["framework"]): row for row in found["rows"]}
    assert set(rows) == {(name, framework) for name in names for framework in ("jax", "torch")}
    for name in names:
        ours, theirs = rows[name, "jax"], rows[name, "torch"]
        # Before the first update and after two: loss, gradient, clipping and optimizer agree.
        assert theirs["first_loss"] == pytest.approx(ours["first_loss"], rel=1e-4)
        assert theirs["last_loss"] == pytest.approx(ours["last_loss"], rel=1e-3)
        assert ours["last_loss"] < ours["first_loss"]
        assert min(ours["tokens_per_second"], theirs["tokens_per_second"], ours["step_bytes"]) > 0
        assert ours["trained_bytes"] == theirs["trained_bytes"]
    assert "eagle3" in capsys.readouterr().out


def test_what_cannot_be_measured(tiny: Path, in_workdir: Path) -> None:
    with pytest.raises(ValueError, match="only='egle' is no objective of the config; it has distill, "):
        profile_train.check(config(tiny, only=("egle",)))
    with pytest.raises(ValueError, match="torch='mtp' is not stated in torch; expected some of distill, eagle, eagle3"):
        profile_train.check(config(tiny, torch=("mtp",)))
    with pytest.raises(ValueError, match="objectives.distill.divergence='tvd' is not stated in torch, 'forward_kl' is"):
        profile_train.check(config(tiny, **{"objectives.distill.divergence": "tvd"}))
    with pytest.raises(ValueError, match="objectives.hydra.prefix=True is not stated in torch, False is"):
        profile_train.check(config(tiny, **{"objectives.hydra.prefix": True}))
    with pytest.raises(ValueError, match="row_length=8; expected at least 1, 1 and 16"):
        profile_train.check(config(tiny, row_length=8))
