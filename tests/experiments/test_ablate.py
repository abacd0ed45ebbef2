"""Ablations: what intervals say, what is kept, and a whole run on a tiny target."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import _cells, _eagle_reading, _main, ablate
from specjax import build
from specjax.checkpoints import load_target
from specjax.training.data import read_answers
from tests.training import common


def config(tiny: Path, folder: Path, **more: object):
    answers = common.answers(40)
    (folder / "own.jsonl").write_text("".join(json.dumps(dataclasses.asdict(a)) + "\n" for a in answers))
    people = [{"instruction": a.prompt, "input": "", "response": f"{a.prompt} indeed"} for a in answers]
    (folder / "people.json").write_text(json.dumps(people))
    text = str(folder / "own.jsonl")
    changes = {
        "base.data.text": text,
        "base.data.held_out_text": text,
        "base.data.online": True,
        "base.data.taps": (0, 1),
        "base.data.row_length": 64,
        "base.data.held_out_rows": 6,
        "base.train.batch": 2,
        "base.train.steps": 3,
        "base.train.log_every": 1,
        "base.train.eval_every": 3,
        "base.optimizer.warmup": 1,
        "human": (str(folder / "people.json"),),
        "max_prompts": 2,
        "max_new_tokens": 6,
        "resamples": 50,
    }
    distilled = ("kl", "reverse_kl", "jsd", "tvd", "lk", "own_text", "human_text")
    unrolled = {"one_step": (0, 1), "three_steps": (0, 1), "one_tap": (1,)}
    changes |= {f"cells.{cell}.objective.taps": taps for cell, taps in unrolled.items()}
    for cell in ("eagle_token", "eagle_feature", "eagle_both", *unrolled, *distilled):
        changes |= {f"cells.{cell}.objective.{key}": 16 for key in ("draft_vocab", "intermediate_size")}
        if cell in distilled:
            changes[f"cells.{cell}.objective.layers"] = (0,)
    return build.load_config("configs/ablations.py", f"{tiny}/target", changes | more)


def test_the_verdict_is_the_intervals(tiny: Path, tmp_path: Path) -> None:
    made = config(tiny, tmp_path)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=40)
    cells = {
        "base": {"measures": {"m": rows.tolist()}},
        "up": {"measures": {"m": (rows + 0.1 + 0.01 * rng.normal(size=40)).tolist()}},
        "noisy": {"measures": {"m": rng.permutation(rows).tolist()}},
        "gaps": {"measures": {"m": [None, *(rows[1:] + 1).tolist()]}},
    }

    def row(better, worse):
        return ablate.compare("p", {"better": better, "worse": worse, "metric": "m", "source": ""}, cells, made)

    # Rows are paired: a tenth shows through a spread of one.
    assert row("up", "base")["verdict"] == "agrees" and row("base", "up")["verdict"] == "refutes"
    assert row("noisy", "base")["verdict"] == "undecided"
    assert row("up", "base")["difference"] == pytest.approx(0.1, abs=0.01)
    assert (row("gaps", "base")["units"], row("gaps", "base")["difference"]) == (39, pytest.approx(1.0))
    # Each category by itself, where there are several; others' prompts are no units.
    parts = {"tau": [2.0, 3.0, 1.0], "tau/code": [2.0, None, 1.0], "tau/maths": [None, 3.0, None]}
    fewer = {key: [x and x - 0.5 for x in values] for key, values in parts.items()}
    decoded = {"dynamic_tree": {"measures": parts}, "static_tree": {"measures": fewer}}
    found = ablate.by_category(made, ["tree"], decoded)
    assert [(r["metric"], r["units"], r["difference"]) for r in found] == [("tau/code", 2, 0.5), ("tau/maths", 1, 0.5)]
    with pytest.raises(ValueError, match="cell 'up' has no 'n'; it has m"):
        ablate.compare("p", {"better": "up", "worse": "base", "metric": "n"}, cells, made)


def test_what_cannot_be_compared(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only='step' is no pair of the config; it has .*feature, "):
        ablate.check(config(tiny, tmp_path, only=("step",)))
    with pytest.raises(ValueError, match="pair 'tvd' names the cell 'tv'; the config has .*dynamic_tree"):
        ablate.check(config(tiny, tmp_path, **{"pairs.tvd.better": "tv"}))
    with pytest.raises(ValueError, match="cell 'static_tree' decodes with the head of 'dynamic_tree', which is no"):
        ablate.check(config(tiny, tmp_path, **{"cells.static_tree.head": "dynamic_tree"}))
    with pytest.raises(ValueError, match="confidence=1.5"):
        ablate.check(config(tiny, tmp_path, confidence=1.5))
    made = config(tiny, tmp_path, only=("tree",))
    assert ablate.needed(made, ablate.check(made)) == ["eagle_both", "static_tree", "dynamic_tree"]


def test_the_small_setting_has_the_claims_of_four_papers_on_fewer_positions() -> None:
    small, whole = (build.load_config("configs/ablations.py", arg) for arg in ("smollm2,small", "smollm2"))
    assert set(ablate.check(small)) == set(small.only) < set(ablate.check(whole))
    cells = ablate.needed(small, ablate.check(small))
    assert {"one_tap", "reverse_kl", "jsd", "human_text"} < set(cells) and "medusa_chain" not in cells
    positions = [c.base.train.steps * c.base.train.batch * c.base.data.row_length for c in (small, whole)]
    assert positions == [30_720, 245_760] and small.base.optimizer.steps == small.base.train.steps
    assert small.cells == whole.cells
    with pytest.raises(ValueError, match="unknown argument 'tiny' of configs/ablations.py behind the target"):
        build.load_config("configs/ablations.py", "smollm2,tiny")


def test_people_answer_the_same_prompts(tiny: Path, tmp_path: Path) -> None:
    made, target = config(tiny, tmp_path), load_target(f"{tiny}/target")
    path = tmp_path / "human.jsonl"
    _cells.write_human(path, tmp_path / "own.jsonl", [Path(p) for p in made.human], target)
    own, people = read_answers(tmp_path / "own.jsonl"), read_answers(path)
    assert [a.key for a in people] == [a.key for a in own]
    assert all(b.response == f"{a.prompt} indeed" for a, b in zip(own, people, strict=True))
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match="none of the prompts of .*own.jsonl is in .*other.json; set config.human"):
        _cells.write_human(path, tmp_path / "own.jsonl", [tmp_path / "other.json"], target)


def test_peoples_answers_are_those_of_todays_files(tiny: Path, tmp_path: Path) -> None:
    made, target = config(tiny, tmp_path), load_target(f"{tiny}/target")
    path, sources = tmp_path / "cells" / "human.jsonl", (tmp_path / "own.jsonl", [Path(p) for p in made.human], target)
    _cells.human_text(path, *sources)
    before = path.stat().st_mtime_ns
    _cells.human_text(path, *sources)
    assert path.stat().st_mtime_ns == before
    people = json.loads((tmp_path / "people.json").read_text())
    others = [entry for entry in people if entry["instruction"] != people[0]["instruction"]]
    (tmp_path / "people.json").write_text(json.dumps(others))
    with pytest.raises(
        ValueError, match=r"human.jsonl was made from something else \(human differ\): give another --wo"
    ):
        _cells.human_text(path, *sources)
    path.with_name("human.jsonl.made_from.json").unlink()
    with pytest.raises(ValueError, match=r"\(text, human, tokenizer not recorded\)"):
        _cells.human_text(path, *sources)
    path.unlink()
    _cells.human_text(path, *sources)
    assert len(read_answers(path)) == len(others) < len(people)


def test_a_cell_on_peoples_answers_is_measured_again_for_other_people(
    tiny: Path, in_workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(_cells, "trained", lambda config, name, *_: calls.append(name) or {"measures": {}})
    for human, again in ((("a.json",), 1), (("a.json",), 0), (("b.json",), 1)):
        calls.clear()
        made = config(tiny, tmp_path, human=human)
        for name in ("own_text", "human_text"):
            ablate.cell(made, name, None, _main.console())
        assert calls.count("human_text") == again
    assert "own_text" not in calls


def test_eagle_reads_what_it_is_told(tiny: Path) -> None:
    target = load_target(f"{tiny}/target")
    options = {"intermediate_size": 16, "draft_vocab": 16}
    width = target.config.hidden_size
    rows = {}
    for reads in _eagle_reading.READS:
        objective = _eagle_reading.make(target, reads=reads, **options)
        params = objective.init(jax.random.key(0), None, {})
        kernel = np.asarray(objective.export(params, {}, {}).params["fc"]["kernel"])
        rows[reads] = kernel[:width].any(), kernel[width:].any()
    assert rows == {"token": (True, False), "feature": (False, True), "both": (True, True)}
    with pytest.raises(ValueError, match="reads='tokens'; expected token, feature, both"):
        _eagle_reading.make(target, reads="tokens", **options)


@pytest.mark.slow
def test_a_run_and_its_resumption(tiny: Path, in_workdir: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    made = config(tiny, tmp_path, only=("feature", "fusion", "reverse_kl", "tree", "text"))
    ablate.main(made)
    found = json.loads((in_workdir / "results.json").read_text())
    assert [row["pair"] for row in found["rows"]] == ["feature", "fusion", "reverse_kl", "text", "tree"]
    for row in found["rows"]:
        assert row["verdict"] in ("agrees", "refutes", "undecided")
        assert row["units"] == len(found["cells"][row["better"]]["measures"][row["metric"]]) >= 2
        assert row["difference"] == pytest.approx(row["value_better"] - row["value_worse"])
    assert {found["cells"][name]["nodes"] for name in ("static_tree", "dynamic_tree")} == {8}
    kl, reverse = (found["cells"][name]["measures"]["sampled/alpha"] for name in ("kl", "reverse_kl"))
    assert kl != reverse
    token, feature = (found["cells"][f"eagle_{reads}"]["measures"]["sampled/alpha"] for reads in ("token", "feature"))
    assert token != feature
    # What is done is not done again.
    monkeypatch.setattr(_cells, "trained", None)
    monkeypatch.setattr(_cells, "decoded", None)
    ablate.main(made)
    again = json.loads((in_workdir / "results.json").read_text())
    assert again["rows"] == found["rows"] and again["cells"] == found["cells"]
