"""The whole program on a tiny model, read back from its run directory."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from experiments import benchmark
from specjax import build
from specjax.evaluation.results import SCHEMA, select
from tests.evaluation.test_rows import FIELDS


def tiny_config(tiny: Path, argument: str = "quick", **more):
    options = {
        "target.source": f"{tiny}/target",
        "rows.draft.source": f"{tiny}/draft",
        "rows.draft.num_nodes": (2,),
        "rows.eagle.source": "",
        "rows.eagle3.source": "",
        "rows.hydra.source": "",
        "prompts": "shipped:writing,multi_turn",
        "max_new_tokens": 10,
        "layout": "plain",
    }
    return build.load_config("configs/quickstart.py", argument, options | more)


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from etils import epath

    from experiments import _main

    folder = tmp_path_factory.mktemp("benchmark") / "run"
    jax.clear_caches()  # programs of other tests would not be compiled, and counted, again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_main, "workdir", lambda: epath.Path(folder))
        benchmark.main(tiny_config(tiny))
    return folder


def test_results_have_the_stable_format(run: Path) -> None:
    found = json.loads((run / "results.json").read_text())
    meta, rows = found["meta"], found["rows"]
    assert meta["schema"] == SCHEMA and meta["precision"]["near_tie_bound"] == 1e-3
    assert meta["config"]["max_new_tokens"] == 10
    assert [row["label"] for row in select(rows, category="all")] == ["autoregressive", "draft", "prompt_lookup"]
    assert {row["category"] for row in rows} >= {"all", "writing", "multi_turn"}
    for row in rows:
        assert set(FIELDS) <= set(row)
    assert [b["method"] for b in meta["best"]]


def test_drafting_kept_the_text_and_saved_passes(run: Path) -> None:
    rows = json.loads((run / "results.json").read_text())["rows"]
    for row in select(rows, category="all"):
        assert row["matches_baseline"] is True and row["near_ties"] == 0
    (draft,) = select(rows, label="draft", category="all")
    assert draft["tau"] > 1.2 and 0 < draft["alpha"] < 1 and len(draft["alpha_by_position"]) == 2
    assert draft["speedup"] > 0 and draft["speedup_predicted"] > 0 and draft["draft_param_bytes"] > 0
    assert draft["kv_bytes_draft"] == draft["kv_bytes_target"], "the draft here is as large as its target"


def test_every_token_is_stored_and_adds_up(run: Path) -> None:
    texts = json.loads((run / "tokens.json").read_text())["texts"]
    rows = json.loads((run / "results.json").read_text())["rows"]
    for label in ("autoregressive", "draft", "prompt_lookup"):
        mine = select(texts, label=label)
        (row,) = select(rows, label=label, category="all")
        assert sum(len(t["tokens"]) for t in mine) == row["new_tokens"]
        assert sum(t["emitted"] for t in mine) / sum(t["steps"] for t in mine) == pytest.approx(row["tau_pooled"])
    turns = select(texts, label="draft", prompt="multi_turn-01")
    first, second = sorted(turns, key=lambda t: t["turn"])
    assert second["prompt_tokens"][: len(first["prompt_tokens"])] == first["prompt_tokens"]


def test_one_program_for_prefill_and_one_for_the_loop(run: Path) -> None:
    meta = json.loads((run / "results.json").read_text())["meta"]
    for names in meta["programs"].values():
        bare = [name.strip("_") for name in names]
        assert bare.count("prefill") <= 1 and bare.count("run") == 1


def test_the_report_shows_coloured_text(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert page.count("<pre>") == 2 and "<mark>" in page
    assert not (run / "measured").exists(), "a run that is whole has nothing to go on with"
    assert (run / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((run / "config.json").read_text())["max_new_tokens"] == 10


def test_rows_without_a_source_are_announced(tiny: Path, in_workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"rows.draft.source": "", "only": ("autoregressive", "draft"), "max_prompts": 1, "coloured_texts": 0}
    benchmark.main(tiny_config(tiny, **options))
    assert "row 'draft' is left out: set --config.rows.draft.source" in capsys.readouterr().out
    rows = json.loads((in_workdir / "results.json").read_text())["rows"]
    assert {row["label"] for row in rows} == {"autoregressive"}


def test_an_interrupted_run_goes_on(
    tiny: Path, in_workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tiny, only=("autoregressive",), coloured_texts=0)
    with monkeypatch.context() as patch:
        patch.setattr(benchmark, "summarise", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            benchmark.main(config)
    with pytest.raises(ValueError, match="measured holds the first part of a run that differs in config.seed"):
        benchmark.main(tiny_config(tiny, only=("autoregressive",), coloured_texts=0, seed=5))
    benchmark.main(config)
    assert "an interrupted run goes on: 2 prompts are measured already" in capsys.readouterr().out
    assert (in_workdir / "results.json").exists()
