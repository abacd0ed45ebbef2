from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from specjax.evaluation import tables
from specjax.evaluation.figures import acceptance_plot, entropy_plot, plot, prediction_plot
from specjax.evaluation.grid import Run
from specjax.evaluation.report import ColouredText, merged_page, page, prompt_points
from specjax.evaluation.results import best_rows

NASTY = '<script>alert("x")</script><img src=x onerror=alert(1)>&'


def row(label: str, **changes: Any) -> dict[str, Any]:
    made = {
        "label": label,
        "method": "draft_model",
        "rule": "greedy",
        "temperature": 0.0,
        "topology": "chain",
        "num_nodes": 4,
        "draft_passes": 4,
        "category": "all",
        "baseline": "plain",
        "prompts": 8,
        "batch": 1,
        "tau": 2.5,
        "tau_ci": [2.25, 2.75],
        "alpha": 0.7,
        "alpha_ci": None,
        "alpha_by_position": [0.8, 0.6, None, None],
        "draft_cost": 0.07,
        "t_ratio": 1.3,
        "one_token_pass_seconds": 0.03,
        "step_seconds": 0.05,
        "tokens_per_second": 60.5,
        "speedup": 1.8,
        "speedup_ci": [1.6, 2.0],
        "speedup_predicted": 1.9,
        "speedup_decode": 2.0,
        "speedup_decode_predicted": 2.1,
        "baseline_over_this": 0.6,
        "baseline_over_this_ci": None,
        "matches_baseline": True,
        "near_ties": 0,
        "distinct_bigram_ratio": 0.8,
        "target_entropy": 1.1,
        "draft_param_bytes": 12_000_000,
    }
    return made | changes


PLAIN = row("plain", method="autoregressive", num_nodes=0, speedup=1.0, speedup_ci=[1.0, 1.0], speedup_predicted=None,
            tau=1.0, tau_ci=[1.0, 1.0], alpha=None, alpha_by_position=[])  # fmt: skip
ROWS = [
    PLAIN,
    row("draft"),
    row("draft", category="all_without_loops", prompts=6, speedup=1.5),
    row("draft", category="code", speedup=2.25),
    row("slow", speedup=0.9, speedup_predicted=None),
]
META = {
    "created": "now", "commit": None, "machine": {"cores": 2}, "versions": {}, "precision": {},
    "config": {"target": {"source": NASTY}},
}  # fmt: skip


class Tags(HTMLParser):
    """Collects tags, and the attributes that could fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.marked: list[str] = []
        self._in_mark = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._in_mark = tag == "mark"
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        self._in_mark = False

    def handle_data(self, data: str) -> None:
        if self._in_mark:
            self.marked.append(data)


def text(label: str, prompt: str, entropy: float | None, reached: list[int], overlap: list[float]) -> dict[str, Any]:
    return {"label": label, "prompt": prompt, "target_entropy": entropy, "reached": reached, "overlap": overlap}


TEXTS = [
    text("draft", NASTY, 1.0, [4, 2], [3.0, 1.0]),
    text("draft", NASTY, 2.0, [2, 0], [1.0, 0.0]),
    text("plain", NASTY, 1.0, [], []),
    text("draft", "older", None, [4], [4.0]),
]


@pytest.fixture(scope="module")
def single() -> str:
    coloured = [ColouredText(NASTY, NASTY, (("plain ", False), (NASTY, True), ("drafted", True), (" end", False)))]
    return page(META, ROWS, title=NASTY, definitions={"tau": NASTY}, texts=TEXTS, coloured=coloured)


@pytest.fixture(scope="module")
def merged() -> str:
    runs = [Run("a", META | {"definitions": {"tau": NASTY}}, ROWS), Run(NASTY, META, [row(NASTY, category="code")])]
    return merged_page(runs, title=NASTY)


def parse(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    return tags


def test_what_a_model_wrote_is_text(single: str, merged: str) -> None:
    for text, images in ((single, 4), (merged, 3)):
        assert NASTY not in text and "alert(" not in text.replace("alert(1)", "").replace("alert(&quot;x", "")
        tags = parse(text).tags
        assert tags.count("script") == 1, "the one that sorts"
        assert tags.count("img") == images


def test_a_page_needs_nothing_but_itself(single: str, merged: str) -> None:
    for text in (single, merged):
        assert not re.search(r"url\(|@import|https?://", text)
        references = parse(text).references
        assert references and all(r.startswith(("data:image/png;base64,", "data:,")) for r in references)


def test_drafted_pieces_are_marked(single: str) -> None:
    assert parse(single).marked == [NASTY, "drafted"]


def test_acceptance_and_entropy_of_a_prompt_are_over_its_turns() -> None:
    (point,) = prompt_points(TEXTS)
    assert (point.label, point.prompt) == ("draft", NASTY)
    assert point.entropy == pytest.approx(1.5) and point.alpha == pytest.approx((4 + 1) / (6 + 2))


def test_what_a_row_lacks_has_no_plot(single: str) -> None:
    assert acceptance_plot([PLAIN]) is None and prediction_plot([PLAIN]) is None and entropy_plot([]) is None
    assert "Entropy and acceptance by prompt" in single
    bare = page(META, [PLAIN], title="t", definitions={})
    assert "Entropy and acceptance by prompt" not in bare and "Measured against predicted" not in bare


def test_measured_over_predicted_stands_in_the_table(single: str) -> None:
    cells = re.findall(r'<td data-value="([^"]*)">([^<]*)</td>', single)
    assert (repr(1.8 / 1.9), "0.95") in cells


def test_runs_are_told_apart(merged: str) -> None:
    assert "a: draft" in merged and "a: slow" in merged
    with pytest.raises(ValueError, match="there are no runs"):
        merged_page([], title="t")


def test_a_plot_is_a_png_that_grows_with_the_rows() -> None:
    few, many = plot(ROWS), plot([*ROWS, *(row(f"r{i}") for i in range(8))])
    assert few.startswith(b"\x89PNG")

    def height(image: bytes) -> int:
        return int.from_bytes(image[20:24], "big")

    assert height(many) > height(few) > 100


def printed(table: Any, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


def test_the_terminal_table() -> None:
    lines = printed(tables.headline_table(ROWS)).splitlines()
    assert "all 8 prompts, batch 1" in lines[0]
    (draft,) = [line for line in lines if " draft " in f" {line} "]
    assert draft.split() == ["draft", "2.50", "0.70", "0.070", "1.30", "60.5", "1.80", "[1.60,", "2.00]", "1.90", "yes"]
    (plain,) = [line for line in lines if "plain" in line]
    assert plain.split()[-1] == "–", "plain decoding is not compared with itself"


def test_categories_stand_side_by_side() -> None:
    lines = printed(tables.category_table(ROWS)).splitlines()
    (draft,) = [line for line in lines if line.strip().startswith("draft")]
    assert draft.split() == ["draft", "1.50", "2.25"]
    (slow,) = [line for line in lines if line.strip().startswith("slow")]
    assert slow.split() == ["slow", "–", "–"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "yes"),
        ({"near_ties": 2}, "yes, 2 near-ties"),
        ({"matches_baseline": False}, "NO"),
        ({"matches_baseline": None}, "–"),
    ],
)
def test_equality_in_a_word(changes: dict, says: str) -> None:
    assert tables.equality(row("draft", **changes)) == says


def test_a_page_has_the_best_tau_in_bold_too() -> None:
    rows = [row("a", category="code", speedup=2.0, tau=2.5), row("b", category="code", speedup=1.0, tau=3.5)]
    text = merged_page([Run("x", META, rows)], title="t")
    assert "<b>2.00</b> / 2.50<" in text and "1.00 / <b>3.50</b><" in text


def test_a_lossy_row_is_no_best_row() -> None:
    rows = [PLAIN, row("draft"), row("typical", speedup=9.0, rule="typical (lossy)")]
    assert [r["label"] for r in best_rows(rows)] == ["draft"]
    lines = tables.findings(rows)
    assert lines[0].startswith("draft_model at temperature 0: best with 4 draft tokens, 1.80")
    assert any(line.startswith("typical is lossy (typical): its 9.00 [1.60, 2.00]x") for line in lines)
    assert "typical (lossy)" in printed(tables.headline_table(rows))


def test_batch_sizes_are_told_apart() -> None:
    rows = [*ROWS, *(r | {"batch": 4, "speedup": 1.2} for r in ROWS if r["label"] != "slow")]
    assert [(r["batch"], r["speedup"]) for r in best_rows(rows)] == [(1, 1.8), (4, 1.2)]
    first, second, *_ = tables.findings(rows)
    assert "temperature 0, batch 1: best with" in first and "1.50x without the 2 of 8" in first
    assert "temperature 0, batch 4: best with" in second and "1.20x without the 2 of 8" in second
    lines = printed(tables.headline_table(rows)).splitlines()
    assert "batch 1, 4" in lines[0] and any("draft, batch 4" in line for line in lines)
    text = page(META, rows, title="t", definitions={})
    assert "draft, batch 1" in text and "draft, batch 4" in text


def test_rows_as_other_harnesses_count_them() -> None:
    rows = [PLAIN | {"tokens_per_second": 20.0}, row("draft", accepted_histogram=[1, 0, 2, 1])]
    rows.append(row("theirs", method="transformers_lookup", accepted_histogram=[0]))
    lines = {}
    for name in tables.CONVENTIONS:
        text = printed(tables.convention_table(rows, name), 240)
        (lines[name],) = [line.split() for line in text.splitlines() if line.strip().startswith("draft")]
    assert lines["spec_bench"] == ["draft", "2.750", "3.025"]
    assert lines["eagle"] == ["draft", "2.750", "0.750", "1.000", "0.333"]
    assert lines["vllm"][:4] == ["draft", "4", "12", "7"]
    assert lines["deepspec"][1:3] == ["2.750", "0.688"]
    with pytest.raises(ValueError, match="row 'draft' has no accepted_histogram: measure again"):
        tables.convention_table([PLAIN, row("draft")], "vllm")


def test_a_miss_is_owed_to_a_term() -> None:
    base = PLAIN | {"step_seconds": 0.03}
    # Apart: 4 drafts of 0.07 and a pass of 1.3 make 1.58 passes of 30 ms, and 3 tokens expected of it.
    right = row("right", speedup=1.85, tau=3.0, speedup_decode_predicted=3.0 / 1.58, step_seconds=0.0474)
    slow = right | {"label": "slow", "speedup": 1.4, "step_seconds": 0.065}
    unlucky = right | {"label": "unlucky", "speedup": 1.4, "tau": 2.2}
    first, second = tables.misses([base, right, slow, unlucky])
    assert first.startswith("slow: measured over predicted is 0.74, most of it the step") and first.endswith("0.73")
    assert second.startswith("unlucky: measured over predicted is 0.74, most of it acceptance")
    assert tables.limit(right) == "held back most by acceptance (3.16x without)"
    assert tables.limit(right | {"num_nodes": 3, "draft_cost": 0.9, "speedup_decode_predicted": 0.6}) == (
        "held back most by the cost of drafts (2.26x without)"
    )


def test_findings_name_the_best_length_loops_and_faults() -> None:
    lines = tables.findings(ROWS)
    assert lines[0].startswith(
        "draft_model at temperature 0: best with 4 draft tokens, 1.80 [1.60, 2.00]x (predicted 1.90x)"
    )
    assert "1.50x without the 2 of 8 prompts whose text loops" in lines[0]
    assert lines[1] == "the best pair is draft: 1.80 [1.60, 2.00]x, tau 2.50 [2.25, 2.75]; by category code 2.25"
    assert "the text of all 8 prompts loops" in tables.findings([PLAIN, row("lookup", prompts=8)])[0]
    assert tables.findings([PLAIN, row("slow", speedup=0.9)])[0] == "no drafter was faster than plain decoding here"
    assert tables.findings([PLAIN, row("draft", matches_baseline=False)])[-1].startswith("NOT EQUAL")
    peer = row("theirs", method="transformers_greedy", num_nodes=0, baseline_over_this=3.4)
    assert "plain runs at 3.40x the tokens/s of theirs" in tables.findings([PLAIN, peer])
