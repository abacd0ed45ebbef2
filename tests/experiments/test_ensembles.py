"""The program that holds ensembles against their members, on a made-up run."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments import ensembles
from specjax import build
from specjax.evaluation.results import SCHEMA
from specjax.models import graph
from specjax.testing import tiny_target
from specjax.training.data import Answer, answers_at
from specjax.training.objectives.registry import OBJECTIVES

LOOKUP, DRAFT = {"name": "prompt_lookup", "num_nodes": 2}, {"name": "draft_model", "source": "d", "num_nodes": 2}
ROWS = {
    "plain": {"name": "autoregressive"},
    "draft": DRAFT,
    "lookup": LOOKUP,
    "union": {"name": "ensemble_union", "members": [DRAFT, LOOKUP]},
    "alien": {"name": "ensemble_union", "members": [DRAFT, {**LOOKUP, "num_nodes": 9}]},
}
# Passes by accepted tokens, of code and of prose.
ACCEPTED = {
    "plain": ([100], [100]),
    "draft": ([40, 30, 30], [60, 20, 20]),
    "lookup": ([60, 20, 20], [90, 5, 5]),
    "union": ([30, 30, 40], [60, 20, 20]),
}


def row(label: str) -> dict[str, Any]:
    return {
        "label": f"{label} T=1",
        "category": "all",
        "temperature": 1.0,
        "method": ROWS[label]["name"],
        "num_nodes": 0 if label == "plain" else 2,
        "alpha": 0.5,
        "tau": {"draft": 2.0}.get(label, 1.5),
        "speedup": {"draft": 1.4, "lookup": None}.get(label, 1.2),
        "speedup_ci": [1.1, 1.3],
        "draft_cost": 0.2,
        "t_ratio": 1.1,
        "draft_param_bytes": 1 << 20,
        "kv_bytes_draft": 1 << 18,
    }


def run(folder: Path, accepted: dict[str, Any]) -> Path:
    texts = [
        {
            "label": f"{label} T=1",
            "prompt": f"{category}-{i}",
            "category": category,
            "accepted": counts,
            "target_entropy": entropy,
            "target_top1": 1 - entropy / 5,
            "observed": {"by_agreement": {"1/2": [10, 4], "1/1": [5, 4]}} if label == "union" else {},
        }
        for label, both in accepted.items()
        for category, counts, entropy in zip(("code", "writing"), both, (0.5, 1.5), strict=True)
        for i in range(3)
    ]
    meta = {
        "schema": SCHEMA,
        "config": {"rows": ROWS},
        "precision": {},
        "created": "now",
        "machine": {"cores": 2},
        "commit": None,
    }
    (folder / "results.json").write_text(json.dumps({"meta": meta, "rows": [row(label) for label in ACCEPTED]}))
    (folder / "tokens.json").write_text(json.dumps({"meta": {}, "texts": texts}))
    return folder


def test_ensembles_are_held_against_their_members(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ensembles.main([str(run(tmp_path, ACCEPTED))])
    document = json.loads((tmp_path / "ensembles.json").read_text())
    assert document["meta"]["schema"] == "specjax.ensembles/1" and document["meta"]["results"]["machine"] == {
        "cores": 2
    }
    assert len(document["rows"]) == 12 and {r["ensemble"] for r in document["rows"]} == {"union"}

    def found(group: str, against: str, statistic: str = "first") -> dict[str, Any]:
        (one,) = (
            r for r in document["rows"] if (r["group"], r["against"], r["statistic"]) == (group, against, statistic)
        )
        return one

    code = found("code and maths", "best")
    assert code["gain"] == pytest.approx(0.1) and code["members"] == pytest.approx({"draft": 0.6, "lookup": 0.4})
    assert (code["verdict"], code["target_entropy"], code["prompts"]) == ("reproduced", 0.5, 3)
    assert (code["best_member"], code["speedup"], code["speedup_best_member"]) == ("draft", 1.2, 1.4)
    assert found("code and maths", "mean")["gain"] == pytest.approx(0.2)
    # 0.7 and 4/7 against 0.6 and 0.5: of each token tried in first place 0.7 and 0.6 were tried in second.
    assert found("code and maths", "best", "mean")["gain"] == pytest.approx((0.7 + 0.4) / 1.7 - (0.6 + 0.3) / 1.6)
    assert (found("the rest", "best")["gain"], found("the rest", "best")["verdict"]) == (0.0, "refuted")
    assert [m["label"] for m in document["members"]] == ["draft T=1", "lookup T=1", "union T=1"]
    shares = {(r["group"], r["share"]): (r["verified"], r["accepted"]) for r in document["by_agreement"]}
    assert list(shares)[:2] == [("all", "1/2"), ("all", "1/1")] and shares["all", "1/2"] == (60, 24)
    assert shares["the rest", "1/1"] == (15, 12)
    peaks = [(r["category"], r["target_entropy"], r["target_top1"]) for r in document["categories"]]
    assert peaks == [("code", 0.5, pytest.approx(0.9)), ("writing", 1.5, pytest.approx(0.7))]
    points = document["break_even"][0]["points"]
    assert document["break_even"][0]["label"] == "draft T=1" and points[0] == 0.0 and points[1] > 0.1
    printed = capsys.readouterr().out
    assert "+10.0" in printed and "H200, union" in printed and "never" in printed


def test_without_a_run_it_prints_the_rooflines(capsys: pytest.CaptureFixture[str]) -> None:
    ensembles.main(["--alpha=0.6"])
    printed = capsys.readouterr().out
    assert "TPU v5p, one chain" in printed and "alpha 0.6" in printed and "N=8" in printed
    with pytest.raises(ValueError, match="--alpha=1.5"):
        ensembles.main(["--alpha=1.5"])


def test_runs_that_compare_nothing(tmp_path: Path) -> None:
    shorter = {**ACCEPTED, "lookup": ([60, 40], [90, 10])}
    with pytest.raises(ValueError, match="draft lengths differ .union 2, draft 2, lookup 1"):
        ensembles.main([str(run(tmp_path, shorter))])
    results = json.loads((tmp_path / "results.json").read_text())
    results["meta"]["config"]["rows"] = {"plain": ROWS["plain"], "alien": ROWS["alien"]}
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(ValueError, match="the rows plain, alien hold no ensemble whose members are rows"):
        ensembles.main([str(tmp_path)])
    with pytest.raises(FileNotFoundError, match="no results at"):
        ensembles.main([str(tmp_path / "nowhere")])


def test_small_drafts_differ_in_text_depth_and_seed() -> None:
    small = tiny_target(layers=30, width=16).config
    shapes = {"hidden_size": 576, "intermediate_size": 1536, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
    target = types.SimpleNamespace(config=dataclasses.replace(small, **shapes))
    seen = []
    for name in ("reasoning", "code", "mixed"):
        config = build.load_config("configs/ensemble_drafts.py", name)
        options = {**config.objective.to_dict(), "draft_vocab": 8}
        draft = OBJECTIVES[options.pop("name")](target, **options).student.config
        own = {key: group for key, group in graph(draft)[1].items() if key not in ("embed", "lm_head")}
        assert sum(int(np.prod(x.shape)) for x in jax.tree.leaves(own)) <= 2e6
        seen.append((tuple(config.data.sources), options["layers"], config.train.seed))
    assert all(len(set(column)) == 3 for column in zip(*seen, strict=True))
    with pytest.raises(ValueError, match="unknown argument 'prose' of configs/ensemble_drafts.py; known: reasoning"):
        build.load_config("configs/ensemble_drafts.py", "prose")


def test_text_of_some_sources(tmp_path: Path) -> None:
    target, file = tiny_target(width=16, layers=1), tmp_path / "answers.jsonl"
    answers = [Answer(source, 0, 0.0, "who", (5, 6, 0), "", "stop") for source in ("a", "b", "b")]
    file.write_text("\n".join(json.dumps(dataclasses.asdict(answer)) for answer in answers) + "\n")
    assert [len(answers_at(file, target, 0.0, s)) for s in ((), ("a",), ("b",), ("a", "b"))] == [3, 1, 2, 3]
    with pytest.raises(ValueError, match="no answers from 'c'; its sources: a, b"):
        answers_at(file, target, sources=("a", "c"))


def test_every_ensemble_of_the_config_has_its_members_among_the_rows() -> None:
    settings = json.loads(json.dumps(build.load_config("configs/ensembles.py", "runs/a,runs/b").rows.to_dict()))
    made = ensembles.members_of(settings)
    assert set(made) == {label for label, row in settings.items() if "members" in row}
    assert all(members == ["draft_1", "draft_2", "lookup"] for members in made.values())
