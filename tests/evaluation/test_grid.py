from __future__ import annotations

import csv
import io
import re

import pytest
from rich.console import Console

from specjax.evaluation import grid
from specjax.evaluation.grid import Run
from tests.evaluation.test_report import row

DEFINITIONS = {"speedup": "tokens/s over plain 100%", "tau": "tokens per target_pass"}


def meta(target: str = "some_model") -> dict:
    return {"config": {"target": {"source": target}}, "definitions": DEFINITIONS}


def contender(label: str, **speedups: float | None) -> list[dict]:
    """Rows of one label, a category each; tau is one more than the speedup."""
    rows = [row(label, category="all", speedup=9.9)]
    return rows + [row(label, category=c, speedup=s, tau=None if s is None else s + 1) for c, s in speedups.items()]


PLAIN = contender("plain", code=1.0, maths=1.0)
A = Run("a", meta(), [*PLAIN, *contender("draft_4", code=2.004, maths=1.5), *contender("look|up", code=2.0, maths=1.7)])


def test_the_mean_weighs_each_data_set_the_same_and_the_best_are_bold() -> None:
    made = grid.methods_by_dataset([A])
    assert made.columns == ("code", "maths", "mean")
    (block,) = made.blocks
    assert block.title == "some_model, T = 0, batch 1"
    by_label = {line.label: line.cells for line in block.lines}
    assert by_label["draft_4"]["mean"] == {"speedup": pytest.approx(1.752), "tau": pytest.approx(2.752)}
    lines = grid.as_markdown(made).splitlines()
    assert "| | code | maths | mean |" in lines and "|---|---:|---:|---:|" in lines
    assert r"| draft\_4 | **2.00** / **3.00** | 1.50 / 2.50 | 1.75 / 2.75 |" in lines
    assert r"| look\|up | **2.00** / **3.00** | **1.70** / **2.70** | **1.85** / **2.85** |" in lines, (
        "a tie as printed"
    )
    assert "mean weighs each data set the same" in lines[-1] and DEFINITIONS["tau"] in lines[-1]


def test_speedups_with_their_intervals() -> None:
    made = grid.with_intervals([A])
    assert "| look" in grid.as_markdown(made) and "**2.00 [1.60, 2.00]** / **3.00**" in grid.as_markdown(made)
    assert "intervals over prompts" in made.caption


def test_latex_is_for_booktabs_and_escaped() -> None:
    text = grid.as_latex(grid.methods_by_dataset([A]))
    assert r"draft\_4 & \textbf{2.00} / \textbf{3.00} & 1.50 / 2.50 & 1.75 / 2.75 \\" in text
    assert r"\caption{" in text and r"plain 100\%" in text and r"target\_pass" in text
    assert r"\multicolumn{4}{l}{\emph{some\_model, T = 0, batch 1}} \\" in text
    assert text.index(r"\toprule") < text.index(r"\midrule") < text.index(r"\bottomrule")
    assert not re.search(r"(?<!\\)[_%#$]", text)
    rows = [line for line in text.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
    assert {line.count("&") for line in rows} == {3}


def test_csv_holds_every_number_as_it_was_stored() -> None:
    rows = list(csv.DictReader(io.StringIO(grid.as_csv(grid.methods_by_dataset([A])))))
    assert [r["row"] for r in rows] == ["plain", "draft_4", "look|up"]
    assert float(rows[1]["code speedup"]) == 2.004 and float(rows[1]["code tau"]) == 3.004
    assert (rows[0]["target"], rows[0]["temperature"], rows[0]["batch"]) == ("some_model", "0.0", "1")


def test_the_terminal_shows_labels_as_they_are() -> None:
    out = io.StringIO()
    made = grid.methods_by_dataset([Run("a", meta("[bold]m"), contender("[red]draft", code=2.0))])
    Console(file=out, width=100).print(grid.as_table(made))
    assert "[red]draft" in out.getvalue() and "[bold]m, T = 0" in out.getvalue() and "2.00 / 3.00" in out.getvalue()


def test_runs_over_different_data_sets_are_one_line() -> None:
    b = Run("b", meta(), [*contender("plain", qa=1.0), *contender("draft_4", qa=1.2)])
    (block,) = grid.methods_by_dataset([A, b]).blocks
    assert [line.label for line in block.lines] == ["plain", "draft_4", "look|up"]
    draft = block.lines[1]
    assert draft.cells["qa"]["speedup"] == 1.2 and draft.cells["mean"]["speedup"] == pytest.approx(
        (2.004 + 1.5 + 1.2) / 3
    )
    assert block.lines[2].cells["qa"]["speedup"] is None
    assert block.lines[2].cells["mean"]["speedup"] is None, "no mean over other data sets than the others'"


def test_drafts_of_another_source_are_other_contenders() -> None:
    runs = []
    for name in ("a", "b"):
        rows = [*contender("plain", **{name: 1.0}), *contender("draft", **{name: 2.0})]
        about = meta()
        about["config"]["rows"] = {"draft": {"source": f"runs/{name}"}}
        runs.append(Run(name, about, rows))
    (block,) = grid.methods_by_dataset(runs).blocks
    assert [line.label for line in block.lines] == ["plain (a)", "plain (b)", "draft (a)", "draft (b)"]


def test_runs_over_the_same_data_set_stay_apart() -> None:
    b = Run("b", meta(), contender("draft_4", maths=1.6, qa=1.2))
    (block,) = grid.methods_by_dataset([A, b]).blocks
    assert [line.label for line in block.lines] == ["plain", "draft_4 (a)", "draft_4 (b)", "look|up"]
    other = [r | {"num_nodes": 8} for r in contender("draft_4", qa=1.2)]
    (block,) = grid.methods_by_dataset([A, Run("b", meta(), other)]).blocks
    assert "draft_4 (b)" in [line.label for line in block.lines], "the same label, but another draft"


def test_targets_temperatures_and_batches_are_not_compared() -> None:
    hot = [r | {"temperature": 1.0} for r in contender("draft_4", code=1.1)]
    b = Run("b", meta("other"), contender("draft_4", code=3.0))
    made = grid.methods_by_dataset([A, Run("hot", meta(), hot), b])
    assert [block.title for block in made.blocks] == [
        "other, T = 0, batch 1", "some_model, T = 0, batch 1", "some_model, T = 1, batch 1",
    ]  # fmt: skip
    assert "**1.10** / **2.10**" in grid.as_markdown(made)


def test_above_batch_1_a_category_has_tau_alone() -> None:
    rows = [row("draft", category="code", batch=4, speedup=None, tau=2.5)]
    text = grid.as_markdown(grid.methods_by_dataset([Run("a", meta(), rows)]))
    assert "| draft | – / **2.50** | – / **2.50** |" in text


def test_above_batch_1_the_mean_is_that_of_all_prompts_together() -> None:
    rows = [row("draft", batch=4, speedup=1.75), row("draft", category="code", batch=4, speedup=None, tau=2.5)]
    text = grid.as_markdown(grid.methods_by_dataset([Run("a", meta(), rows)]))
    assert "| draft | – / **2.50** | **1.75** / **2.50** |" in text


def test_a_lossy_row_is_marked_and_the_best_of_nothing() -> None:
    fast = [r | {"rule": "typical (lossy)"} for r in contender("typical", code=9.0, maths=9.0)]
    text = grid.as_markdown(grid.methods_by_dataset([Run("a", meta(), [*A.rows, *fast])]))
    assert "| typical (lossy) | 9.00 / 10.00 | 9.00 / 10.00 | 9.00 / 10.00 |" in text
    assert r"| draft\_4 | **2.00** / **3.00** |" in text


def test_runs_without_categories() -> None:
    with pytest.raises(ValueError, match="the runs a hold no rows of any category"):
        grid.methods_by_dataset([Run("a", meta(), [row("draft")])])
