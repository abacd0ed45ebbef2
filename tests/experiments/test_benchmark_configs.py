"""Configs of the zoo, of Spec-Bench and of the papers: what they measure can be measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from experiments import benchmark
from specjax import build
from specjax.checkpoints import drafters, save_target
from specjax.testing import tiny_target

ROOT = Path(__file__).resolve().parents[2]
# The first of each is what no argument gives.
PAPERS = {
    "leviathan": ("small",),
    "chen": ("small",),
    "block_verification": ("vicuna7b", "small"),
    "medusa": ("vicuna7b", "vicuna13b", "small"),
    "hydra": ("vicuna7b", "vicuna13b", "small"),
    "eagle": ("vicuna7b", "vicuna13b", "small"),
    "lookahead": ("llama2_7b", "small"),
    "layerskip": ("llama2_7b", "small"),
    "spec_bench": ("vicuna7b", "small"),
    "gloeckle": ("small",),
}


def check(config) -> None:
    """Settings and rows are in range, drafters and rules exist, plain decoding takes part."""
    build.settings_from_config(config)
    lineup = build.lineup_from_config(config)
    for row in lineup.rows.values():
        build.lookup(build.DRAFTERS, row["name"], "drafter")
        if row.get("rule"):
            build.lookup(build.RULES, row["rule"], "rule")
    assert any(row["name"] == "autoregressive" for row in lineup.kept.values())


@pytest.mark.parametrize(("paper", "setting"), [(p, s) for p, settings in PAPERS.items() for s in settings])
def test_a_paper(paper: str, setting: str) -> None:
    config = build.load_config(f"configs/papers/{paper}.py", setting)
    check(config)
    assert config.published and config.is_locked
    small = setting == "small" and paper != "gloeckle"
    assert (config.target.source == "smollm2") is small
    if setting == PAPERS[paper][0]:
        assert build.load_config(f"configs/papers/{paper}.py") == config
        with pytest.raises(ValueError, match=f"unknown argument 'large' of configs/papers/{paper}.py; known: .*small"):
            build.load_config(f"configs/papers/{paper}.py", "large")


def test_lookahead_moves_one_of_window_length_and_guesses_at_a_time() -> None:
    rows = build.load_config("configs/papers/lookahead.py", "small").rows.to_dict()
    shapes = {label: (r["window"], r["ngram"], r["guesses"]) for label, r in rows.items() if r["name"] == "lookahead"}
    assert all(label.startswith("W{} N{} G{}".format(*shape)) for label, shape in shapes.items())
    assert all(sum(a != b for a, b in zip(shape, (5, 3, 5), strict=True)) <= 1 for shape in shapes.values())
    assert [len({shape[k] for shape in shapes.values()}) for k in range(3)] == [4, 3, 3]
    own = {label for label, r in rows.items() if r.get("pool_from_prompt") is False}
    assert own == {"W5 N3 G5 own", "W1 N3 G5 own"}


def test_every_benchmark_config_of_a_paper_is_tested() -> None:
    files = {path.stem for path in (ROOT / "configs" / "papers").glob("[!_]*.py") if "_base" in path.read_text()}
    assert files == set(PAPERS)


@pytest.mark.parametrize(
    ("name", "argument", "prompts", "tokens", "temperatures"),
    [
        ("spec_bench", None, 0, 128, (0.0, 1.0)),
        ("spec_bench", "quick", 10, 64, (0.0, 1.0)),
        ("spec_bench", "small", 2, 32, (0.0,)),
        ("zoo", None, 10, 128, (0.0, 1.0)),
        ("zoo", "quick", 1, 16, (0.0,)),
    ],
)
def test_spec_bench_and_zoo(name: str, argument: str | None, prompts: int, tokens: int, temperatures: tuple) -> None:
    config = build.load_config(f"configs/{name}.py", argument)
    check(config)
    assert config.prompts.startswith("spec_bench:$SPECJAX_DATA/")
    assert (config.prompts_per_category, config.max_new_tokens, tuple(config.temperatures)) == (
        prompts, tokens, temperatures,
    )  # fmt: skip
    for entry in drafters.zoo_entries():
        assert any(f"{entry} {shape}" in config.rows for shape in ("chain", "tree"))
    with pytest.raises(ValueError, match=f"unknown argument 'fast' of configs/{name}.py"):
        build.load_config(f"configs/{name}.py", "fast")


def test_rows_of_a_head_that_is_not_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from configs import zoo

    entry = drafters.zoo_entries()[0]
    assert zoo.entry_rows(entry)["chain"]["source"] == entry
    folder = tmp_path / "heads"
    shutil.copytree(drafters.ZOO / entry, folder)
    file = folder / drafters.CONFIG
    trees = {"chain", "tree", "large tree"}
    for method, shapes in {"medusa": {"chain"}, "eagle": trees, "eagle3": trees}.items():
        file.write_text(file.read_text().replace(f'"{drafters.saved_method(folder)}"', f'"{method}"'))
        rows = zoo.entry_rows(str(folder))
        assert set(rows) == shapes and all(row["source"] == str(folder) for row in rows.values())
    assert zoo.entry_rows(str(folder))["tree"]["levels"] == zoo.LEVELS
    with pytest.raises(ValueError, match="'nothing' is no saved drafter; the zoo has"):
        zoo.entry_rows("nothing")


def test_errors_say_what_to_do(data_dir: Path) -> None:
    """Unknown data sets and categories, before anything is loaded."""
    from specjax.evaluation.prompts import load_prompts

    with pytest.raises(ValueError, match="no prompts named 'specbench:x'.*did you mean 'spec_bench'.*humaneval"):
        load_prompts("specbench:x")
    with pytest.raises(ValueError, match="no prompts of category 'cod'; did you mean 'code'"):
        load_prompts("shipped:cod")


@pytest.mark.slow
def test_spec_bench_on_a_small_context(
    in_workdir: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes for tokens: some prompts are beyond the context, which is an error or counted, as the config says."""
    monkeypatch.setenv("SPECJAX_DATA", str(data_dir))
    save_target(tiny_target(layers=1, width=16, context=3072), tmp_path / "target")
    options = {
        "target.source": f"{tmp_path}/target",
        "layout": "plain",
        "max_new_tokens": 4,
        "only": ("autoregressive", "prompt_lookup"),
        "coloured_texts": 0,
    }
    with pytest.raises(ValueError, match="prompt 'spec_bench/.*' has .* tokens, but the model's context is 3072"):
        benchmark.main(build.load_config("configs/spec_bench.py", "small", options))
    benchmark.main(build.load_config("configs/spec_bench.py", "small", options | {"long_prompts": "skip"}))
    found = json.loads((in_workdir / "results.json").read_text())
    skipped = found["meta"]["skipped_prompts"]
    (row,) = (r for r in found["rows"] if r["label"] == "prompt_lookup" and r["category"] == "all")
    assert len(skipped) == 2 and row["prompts"] == 12 - 2 and row["matches_baseline"]
    assert {r["category"] for r in found["rows"]} >= {"mt_bench", "translation", "summarization", "qa", "rag"}
