"""A zoo entry from a run directory: what is in it, that it loads, and that it names no path of this machine."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
from absl import flags

from experiments import pack_zoo
from specjax import build
from specjax.checkpoints.drafters import load_drafter, save_drafter
from specjax.checkpoints.rundir import RunDirectory
from specjax.checkpoints.sources import load_target

STEPS = 20


@pytest.fixture
def run(tiny: Path, tmp_path: Path) -> Path:
    """A run directory as experiments.train leaves it, but for what is in the checkpoints."""
    target = load_target(f"{tiny}/target", dtype="float32")
    config = build.load_config(
        "configs/medusa.py",
        f"{tiny}/target",
        {
            "data.store": str(tmp_path / "store"),
            "data.held_out.greedy": str(tmp_path / "held"),
            "objective.draft_vocab": 16,
            "train.batch": 2,
            "train.steps": STEPS,
            "optimizer.steps": STEPS,
            "optimizer.rates": (("heads/0", 0.5),),
        },
    )
    options = config.objective.to_dict()
    objective = build.OBJECTIVES[options.pop("name")](target, **options)
    params = objective.init(jax.random.key(0), None, {})
    info = {"step": 10, "rows": 1234, "held_out": {}, "training": config.to_dict()}
    folder = tmp_path / "run"
    save_drafter(folder / "drafter", objective.export(params, {"vocab": jax.numpy.arange(16)}, info), target)
    made = RunDirectory(folder)
    made.claim(config.to_dict())
    writer = made.writer(-1)
    writer.write(0, **{"greedy/match_0": 0.0501234567, "greedy/accepted": 0.06, "sampled/match_0": 0.04})
    writer.write(10, **{"train/loss_positions": 700, "train/tokens": 2100.0, "train/loss": 1.0})
    writer.write(10, **{"greedy/match_0": 0.4, "greedy/accepted": 0.5, "sampled/match_0": 0.3})
    writer.flush()
    (folder / "checkpoints" / str(STEPS)).mkdir(parents=True)
    return folder


def pack(monkeypatch: pytest.MonkeyPatch, run: Path, to: Path, tiny: Path, **changes: object) -> None:
    monkeypatch.setattr(flags.FLAGS["from"], "value", str(run))
    monkeypatch.setattr(flags.FLAGS["to"], "value", str(to))
    pack_zoo.main(build.load_config("configs/pack_zoo.py", f"{tiny}/target", changes))


@pytest.mark.pitfall("SpecForge#128; EAGLE#276,#227; speculators#751")
def test_an_entry_loads_and_says_how_it_came_to_be(run: Path, tiny: Path, tmp_path: Path, monkeypatch) -> None:
    to = tmp_path / "tiny-medusa"
    pack(monkeypatch, run, to, tiny)
    assert sorted(p.name for p in to.iterdir()) == ["README.md", "config.json", "metrics.json", "model.safetensors"]
    target = load_target(f"{tiny}/target", dtype="float32")
    saved, mine = load_drafter(to, target), load_drafter(run, target)
    assert (saved.method, saved.config, saved.info["step"]) == ("medusa", mine.config, 10)
    for a, b in zip(jax.tree.leaves(saved.params), jax.tree.leaves(mine.params), strict=True):
        assert (a == b).all()
    assert json.loads((to / "metrics.json").read_text())["steps"][0]["greedy/match_0"] == 0.05012
    # The paths of the stores are those of the config file.
    assert str(tmp_path) not in (to / "config.json").read_text().replace(str(tiny), "")
    assert saved.info["training"]["data"]["store"] == "runs/hidden/smollm2/train"
    card = (to / "README.md").read_text()
    assert "--config.train.batch=2" in card and "eval_every" not in card and "data.store" not in card
    assert "--config.optimizer.rates=\"(('heads/0', 0.5),)\"" in card
    assert "| 10 | 7,000 | 0.400 | 0.500 | 0.300 |" in card and "`greedy/accepted`" in card
    with pytest.raises(ValueError, match="holds an entry already"):
        pack(monkeypatch, run, to, tiny)


def test_paths_that_have_a_name(run: Path, tiny: Path, tmp_path: Path, monkeypatch) -> None:
    paths = ((str(tmp_path), "$PWD/runs"), (str(tmp_path / "store"), "runs/more"))
    pack(monkeypatch, run, tmp_path / "tiny-medusa", tiny, paths=paths)
    config = json.loads((tmp_path / "tiny-medusa/config.json").read_text())["info"]["training"]["data"]
    assert (config["store"], config["held_out"]["greedy"]) == ("runs/more", "$PWD/runs/held")
    assert '--config.data.store="runs/more"' in (tmp_path / "tiny-medusa/README.md").read_text()
    both = pack_zoo.published({"objective": {"name": "none"}, "store": f"{tmp_path}/store/train,{tmp_path}/b"}, paths)
    assert both["store"] == "runs/more/train,$PWD/runs/b"
    half = pack_zoo.published({"objective": {"name": "none"}, "store": f"{tmp_path}/store,/elsewhere/b"}, paths)
    assert half["store"] == "store,b"


def test_what_is_no_entry_yet(run: Path, tiny: Path, tmp_path: Path, monkeypatch) -> None:
    to = tmp_path / "entry"
    monkeypatch.setattr(flags.FLAGS["from"], "value", None)
    with pytest.raises(ValueError, match="--from is missing"):
        pack_zoo.main(build.load_config("configs/pack_zoo.py"))
    with pytest.raises(ValueError, match="MiB, and max_mib=0.001: train a smaller"):
        pack(monkeypatch, run, to, tiny, max_mib=0.001)
    (run / "checkpoints" / str(STEPS)).rename(run / "checkpoints" / "10")
    with pytest.raises(ValueError, match="is at step 10 of 20: end the training first"):
        pack(monkeypatch, run, to, tiny)
    with pytest.raises(ValueError, match="is no run directory with a trained drafter"):
        pack(monkeypatch, tmp_path / "nothing", to, tiny)
    assert not to.exists()
