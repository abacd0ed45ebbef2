"""Measuring for the planner, on a tiny model; what it does with the numbers is tested in tests/analysis."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import _calibration, _plan_check, plan
from specjax import analysis, build
from specjax.checkpoints import load_target
from specjax.decoding.tree import from_branching, from_choices
from specjax.evaluation.benchmark import Settings
from specjax.evaluation.contenders import LoopContender
from specjax.evaluation.lineup import Lineup
from specjax.evaluation.prompts import Prompt
from specjax.evaluation.results import SCHEMA, select
from tests.experiments.trees import CHOICES

TREE = {"name": "tests.experiments.trees:make", "choices": CHOICES, "tree": "choices"}


def tiny_config(tiny: Path, **more):
    options = {
        "target.source": f"{tiny}/target", "rows.draft.source": f"{tiny}/draft", "rows.draft.num_nodes": (1, 3),
        "prompts": "shipped:writing,code", "max_new_tokens": 12, "layout": "plain", "tokens": (1, 4, 7),
        "contexts": (32,),
    }  # fmt: skip
    config = build.load_config("configs/plan.py", "quick", options | more)
    with config.unlocked():
        config.rows.tree = TREE
        config.only = ("autoregressive", "draft", "tree")
    return config


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from etils import epath

    from experiments import _main

    folder = tmp_path_factory.mktemp("plan") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_main, "workdir", lambda: epath.Path(folder))
        plan.main(tiny_config(tiny))
    return folder


def test_a_plan_follows_from_what_was_measured(run: Path) -> None:
    found = json.loads((run / "plan.json").read_text())
    assert found["meta"]["schema"] == plan.SCHEMA
    assert [t["tokens"] for t in found["target_passes"]] == [1, 4, 7]
    assert {d["row"] for d in found["drafting"]} == {"autoregressive", "draft 1", "draft 3", "tree"}
    rates = {name: np.array(rates) for name, rates in found["acceptance_by_depth_and_rank"].items()}
    assert rates["draft"].shape == (3, 1) and rates["tree"].shape in ((1, 2), (2, 2))
    assert (rates["draft"] > 0).all() and rates["draft"].mean() < 1
    (made,) = found["plans"]
    curve = analysis.target_curve([analysis.Timing(**t) for t in found["target_passes"]], batch=1, context=32)
    seconds = {d["row"]: d["seconds"] for d in found["drafting"]}
    beyond = {o["row"]: o["seconds"] for o in found["overheads"]}
    assert set(beyond) == {"draft", "tree"} and min(beyond.values()) >= 0
    draft = analysis.Candidate(
        "draft", rates["draft"], analysis.Curve((1, 3), (seconds["draft 1"], seconds["draft 3"])), beyond["draft"]
    )
    # One pass drafts the whole tree, however deep.
    tree = analysis.Candidate("tree", rates["tree"], analysis.Curve((1, 2), (seconds["tree"],) * 2), beyond["tree"])
    (noise,) = found["noise"]
    assert noise["relative"] >= 0
    again = analysis.plan([draft, tree], curve, margin=noise["relative"])
    assert (made["method"], made["speedup"]) == (again.method, pytest.approx(again.speedup))
    assert made["paths"] == [list(path) for path in again.paths]


def test_the_plan_is_held_against_other_prompts(run: Path) -> None:
    found = json.loads((run / "results.json").read_text())
    (made,), rows = found["meta"]["plans"], select(found["rows"], category="all")
    assert found["meta"]["schema"] == SCHEMA and "speedup_planned" in found["meta"]["definitions"]
    (planned,) = [row for row in rows if row["planned"]]
    assert planned["num_nodes"] == made["num_nodes"] and planned["prompts"] == 2
    assert all(row["matches_baseline"] for row in rows)
    if made["paths"]:
        assert planned["label"] == f"{made['method']} as planned"
        assert planned["speedup_planned"] == pytest.approx(made["speedup"]) and planned["speedup_decode"] > 0
    else:
        assert planned["method"] == "autoregressive"
    (verdict,) = found["meta"]["verdicts"]
    assert verdict["planned"] == planned["label"] and verdict["rows"] == len(rows) and 0 < verdict["ratio"] <= 1
    texts = json.loads((run / "tokens.json").read_text())["texts"]
    assert {t["label"] for t in texts} == {row["label"] for row in rows} and all(t["tokens"] for t in texts)
    assert found["meta"]["skipped_prompts"] == []


def test_acceptance_by_rank_adds_up_to_the_loop_s_own_counts(tiny: Path) -> None:
    target = load_target(str(tiny / "target"))
    lineup = Lineup({"autoregressive": {"name": "autoregressive"}, "tree": TREE})
    plain, contender = build.contenders(lineup, target)
    assert isinstance(plain, LoopContender) and isinstance(contender, LoopContender)
    prompts = [Prompt("a", "x", ("Hello there",)), Prompt("b", "x", ("1 2 3",))]
    asked = _calibration.requests(prompts, contender, target, Settings(max_new_tokens=48))
    for one in (plain, contender):
        one.prepare(asked[0], 192)
    # The tree drafts what most often followed each token in the very texts.
    table = successors([plain.complete(request).completion.tokens for request in asked], target.config.vocab_size)
    contender.weights = contender.weights.replace(tables={"successors": jnp.asarray(table)})

    spec = from_choices(CHOICES)
    counts = sum(_calibration.rank_counts(contender, spec, request) for request in asked)
    done = [contender.complete(request).completion for request in asked]
    accepted = np.sum([c.accepted for c in done], axis=0)
    at_least = accepted[::-1].cumsum()[::-1]
    # The last step of a text may be cut: a token it accepted is then no token of the text.
    assert counts[0].sum() == at_least[0]
    assert abs(counts[0, :2].sum() - at_least[1]) <= 2 and abs(counts[1, :2].sum() - at_least[2]) <= 2
    assert (counts[0, :2] > 0).all() and counts[1, 0] > 0, "some steps accept the first, some the second, some none"
    rates = _calibration.acceptance(contender, asked)
    np.testing.assert_allclose(rates, counts[:, :2] / counts.sum(axis=1, keepdims=True))
    measured = 1 + (accepted * np.arange(3)).sum() / accepted.sum()
    assert analysis.tree_tokens(rates, CHOICES) == pytest.approx(measured, abs=0.1)


def successors(texts: list[tuple[int, ...]], vocab: int) -> np.ndarray:
    """`[V, 2]`: the two most frequent successors of each token."""
    pairs = Counter(pair for text in texts for pair in itertools.pairwise(text))
    table = np.tile([1, 2], (vocab, 1))
    for before in {before for before, _ in pairs}:
        ranked = sorted((-count, after) for (one, after), count in pairs.items() if one == before)
        table[before, : len(ranked)] = [after for _, after in ranked[:2]]
    return table.astype(np.int32)


def test_a_tree_must_show_every_rank() -> None:
    _calibration.check_even(from_branching((3, 2, 1)))
    with pytest.raises(ValueError, match="the nodes at depth 1 of the calibration's tree"):
        _calibration.check_even(from_choices([(0,), (1,), (0, 0)]))
    with pytest.raises(ValueError, match="the nodes at depth 0"):
        _calibration.check_even(from_choices([(0,), (2,)]))


PROMPTS = [Prompt(f"{category}{i}", category, ("x",)) for category in ("a", "b") for i in range(3)]


def test_prompts_for_the_plan_and_for_the_check_are_apart() -> None:
    first, rest = plan.split(PROMPTS, 1)
    assert [p.id for p in first] == ["a0", "b0"] and [p.id for p in rest] == ["a1", "a2", "b1", "b2"]
    with pytest.raises(ValueError, match="all 6 prompts are for calibration"):
        plan.split(PROMPTS, 3)


LINEUP = Lineup(
    {"plain": {"name": "autoregressive"}, "draft": {"name": "draft_model", "num_nodes": (1, 4)}, "heads": TREE}
)


def test_a_plan_becomes_a_row() -> None:
    chain = analysis.Plan("draft", ((0,), (0, 0)), 2.0, 1.0, 1.5)
    assert _plan_check.with_plan(LINEUP, chain, sweep=False).rows == {
        "plain": LINEUP.rows["plain"],
        "draft as planned": {"name": "draft_model", "num_nodes": 2},
    }
    tree = analysis.Plan("heads", ((0,), (1,)), 2.0, 1.0, 1.5)
    assert _plan_check.with_plan(LINEUP, tree, sweep=True).rows == dict(LINEUP.rows) | {
        "heads as planned": TREE | {"choices": ((0,), (1,))}
    }
    nothing = analysis.Plan("autoregressive", (), 1.0, 1.0, 1.0)
    assert list(_plan_check.with_plan(LINEUP, nothing, sweep=False).rows) == ["plain"]
    assert _plan_check.advice(chain) == "row 'draft' with num_nodes=2: predicted 1.50x"
    assert "choices=[(0,), (1,)]" in _plan_check.advice(tree) and "decode plainly" in _plan_check.advice(nothing)


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"name": "eagle", "source": "x", "choices": CHOICES}, {"name": "eagle", "source": "x"}),
        ({"name": "eagle3", "source": "x", "num_nodes": (1, 4)}, {"name": "eagle3", "source": "x"}),
        ({"name": "medusa", "source": "x"}, {"name": "medusa", "source": "x", "tree": "choices"}),
    ],
)
def test_a_tree_is_written_as_each_maker_takes_it(row: dict, options: dict) -> None:
    made = analysis.Plan("x", ((0,), (1,), (0, 0)), 2.0, 1.0, 1.5)
    found = _plan_check.planned_row(row, made)
    assert found == options | {"choices": made.paths}
    maker = build.lookup(build.DRAFTERS, found["name"], "drafter")
    inspect.signature(maker).bind("target", **{k: v for k, v in found.items() if k != "name"})


def test_a_tree_that_a_drafter_cannot_make_is_an_error() -> None:
    made = analysis.Plan("x", ((0,), (1,)), 2.0, 1.0, 1.5)
    with pytest.raises(ValueError, match="the drafter 'draft_model' drafts no static trees"):
        _plan_check.planned_row({"name": "draft_model"}, made)


def test_trees_are_timed_at_every_depth() -> None:
    found = plan.with_depths(LINEUP).rows
    assert list(found) == ["plain", "draft", "heads", "heads to 1"]
    assert found["heads to 1"]["choices"] == ((0,), (1,))


def test_a_sweep_has_trees_of_several_sizes() -> None:
    rates = np.array([[0.5, 0.2, 0.1], [0.4, 0.2, 0.1]])
    candidate = analysis.Candidate("heads", rates, analysis.Curve((1, 2), (0.1, 0.2)))
    chain = analysis.Candidate("draft", rates[:, :1], analysis.Curve((1, 2), (0.1, 0.2)))
    curve = analysis.Curve((1, 9), (1.0, 1.2))
    found = _plan_check.spread_trees([candidate, chain], curve)
    assert [p.num_nodes for p in found.values()] == [1, 2, 4, 5, 7, 8]
    rows = _plan_check.with_plan(LINEUP, found["heads of 4 nodes"], sweep=True, trees=found).rows
    assert set(rows) == {*LINEUP.rows, "heads as planned", *found}
    assert rows["heads of 8 nodes"]["choices"] == found["heads of 8 nodes"].paths


def measured(label: str, speedup: float | None, ci=None, *, planned=False, batch=1, rule="greedy") -> dict:
    return {"label": label, "batch": batch, "speedup_decode": speedup, "speedup_decode_ci": ci, "planned": planned,
            "rule": rule, "baseline": "plain", "live_rows": 1.0, "decode_tokens_per_second": 10.0 * (speedup or 1),
            "tokens_per_second": 9.0 * (speedup or 1)}  # fmt: skip


def test_a_plan_is_judged_by_the_best_that_was_measured() -> None:
    best = measured("draft 4", 2.0, [1.8, 2.2])
    rows = [measured("plain", 1.0), best, measured("loose", 9.0, rule="typical (lossy)")]

    def judged(speedup: float) -> dict:
        (found,) = _plan_check.verdicts([*rows, measured("draft as planned", speedup, planned=True)])
        return found

    assert judged(1.95)["within"] and judged(1.95)["best"] == "draft 4" and judged(1.95)["rows"] == 3
    inside = judged(1.85)
    assert not inside["within"] and inside["inside"] and inside["agrees"] and "inside its interval" in inside["said"]
    missed = judged(1.5)
    assert not missed["agrees"] and missed["ratio"] == pytest.approx(0.75) and "MISSED" in missed["said"]
    two = [*rows, measured("plain", 1.0, planned=True, batch=4)]
    (other,) = _plan_check.verdicts(two)
    assert other["batch"] == 4 and other["ratio"] == 1.0, "a batch of which nothing was planned has no verdict"


def test_batches_stand_side_by_side() -> None:
    import io

    from rich.console import Console

    rows = [measured("plain", 1.0), measured("draft as planned", 2.0, planned=True)]
    rows += [measured("plain", 1.0, batch=64, planned=True)]
    out = io.StringIO()
    Console(file=out, width=120).print(_plan_check.batch_table(rows))
    one, many = [line.split() for line in out.getvalue().splitlines() if line.strip()[:1].isdigit()]
    assert one[:8] == ["1", "1.0", "10.0", "20.0", "2.00", "9.0", "18.0", "2.00"] and one[8:] == [
        "draft",
        "as",
        "planned",
    ]
    assert many[:5] == ["64", "1.0", "10.0", "10.0", "1.00"]


def test_noise_is_that_of_a_median() -> None:
    assert _calibration.relative_noise([1.0] * 9) == 0.0
    seconds = [0.98, 0.99, 1.0, 1.01, 1.02] * 5
    assert _calibration.relative_noise(seconds) == pytest.approx(2 * 1.2533 * 1.4826 * 0.01 / 5)


def test_rows_whose_names_begin_alike_are_told_apart() -> None:
    class Named:
        def __init__(self, label: str):
            self.info = dataclasses.make_dataclass("Info", ["label"])(label)

    lineup = Lineup({"draft": {"name": "x"}, "draft big": {"name": "x"}})
    members = [Named(label) for label in ("draft 1", "draft 4", "draft big 1", "draft big")]
    found = {row: [m.info.label for m in mine] for row, mine in _plan_check.by_row(lineup, members)}  # type: ignore[arg-type]
    assert found == {"draft": ["draft 1", "draft 4"], "draft big": ["draft big 1", "draft big"]}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"check": "all"}, "check='all'; expected one of plan, sweep, none"),
        ({"temperatures": (0.0, 1.0)}, "a plan is for one temperature"),
        ({"tokens": (2, 3)}, "expected 1 and rising numbers after it"),
        ({"batches": ()}, "batches=.*expected numbers of at least 1"),
        ({"calibration_per_category": 2}, "all 4 prompts are for calibration: raise prompts_per_category above 2"),
    ],
)
def test_settings_are_checked_before_a_model_is_loaded(in_workdir: Path, wrong: dict, says: str) -> None:
    config = build.load_config("configs/plan.py", "quick", {"target.source": "nowhere"} | wrong)
    with pytest.raises(ValueError, match=says):
        plan.main(config)
    assert not in_workdir.exists()
