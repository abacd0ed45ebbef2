"""A benchmark as a plot and as one HTML page that needs nothing but itself."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specjax.evaluation import tables
from specjax.evaluation.results import best_rows, select

Row = Mapping[str, Any]


@dataclass(frozen=True)
class ColouredText:
    """A text whose pieces say whether they were drafted.

    Attributes:
        title: what it is.
        question: the user's turn.
        pieces: `(text, accepted from the draft)` in order.
    """

    title: str
    question: str
    pieces: tuple[tuple[str, bool], ...]


def plot(rows: Sequence[Row]) -> bytes:
    """A PNG: speedup with its interval and its prediction beside it, and tau, a bar a contender."""
    from matplotlib.figure import Figure

    chosen = select(rows, category="all")
    labels = [row["label"] for row in chosen]
    places = range(len(chosen))
    figure = Figure(figsize=(11, 1.6 + 0.42 * len(chosen)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)

    values = [row["speedup"] or 0.0 for row in chosen]
    left.barh(places, values, 0.62, xerr=_errors(chosen, "speedup"), color="#4878a8", ecolor="#222222", capsize=3)
    predicted = [(place, row["speedup_predicted"]) for place, row in zip(places, chosen, strict=True)]
    predicted = [(place, value) for place, value in predicted if value is not None]
    if predicted:
        at, value = zip(*predicted, strict=True)
        left.plot(value, at, "D", color="#d1603d", markersize=7, label="predicted speedup")
        figure.legend(loc="outside upper right", frameon=False)
    left.axvline(1.0, color="#222222", linewidth=1, linestyle=":")
    left.set_xlabel("speedup over plain decoding")

    tau = [row["tau"] or 0.0 for row in chosen]
    right.barh(places, tau, 0.62, xerr=_errors(chosen, "tau"), color="#6aa56e", ecolor="#222222", capsize=3)
    right.axvline(1.0, color="#222222", linewidth=1, linestyle=":")
    right.set_xlabel("tau: tokens per target pass")

    left.set_yticks(list(places), labels)
    left.invert_yaxis()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=130)
    return out.getvalue()


def _errors(rows: Sequence[Row], name: str) -> list[list[float]]:
    """Distances from value to interval, as matplotlib takes them."""
    low, high = [], []
    for row in rows:
        value, interval = row[name], row[f"{name}_ci"]
        known = value is not None and interval is not None
        low.append(max(value - interval[0], 0.0) if known else 0.0)
        high.append(max(interval[1] - value, 0.0) if known else 0.0)
    return [low, high]


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.92rem; }
.wide { overflow-x: auto; }
th, td { padding: 0.25rem 0.7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } tr.best td { font-weight: 600; }
img { max-width: 100%; } dt { font-weight: 600; } dd { margin: 0 0 0.5rem 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f4; padding: 0.8rem; border-radius: 4px;
  font: 14px/1.6 ui-monospace, monospace; }
mark { background: #bfe3c4; color: inherit; border-radius: 2px; } .question { color: #555; }
"""


def page(
    meta: Mapping[str, Any],
    rows: Sequence[Row],
    *,
    title: str,
    definitions: Mapping[str, str],
    coloured: Sequence[ColouredText] = (),
) -> str:
    """The whole report as HTML; every text that a model or a user wrote is escaped.

    Args:
        meta: of the results.
        rows: of the results.
        title: heading.
        definitions: what each number counts.
        coloured: texts to show with their drafted tokens marked.
    """
    image = base64.b64encode(plot(rows)).decode()
    parts = [
        f"<h1>{_escape(title)}</h1>",
        "".join(f"<p>{_escape(line)}</p>" for line in tables.findings(rows)),
        f'<img alt="speedup and tau of every row" src="data:image/png;base64,{image}">',
        "<h2>All prompts</h2>",
        _headline(select(rows, category="all"), rows),
        "<h2>Speedup by category</h2>",
        _by_category(rows, "speedup"),
        "<h2>tau by category</h2>",
        _by_category(rows, "tau"),
        "<h2>Where the time of a step goes</h2>",
        _step(select(rows, category="all")),
        "<h2>Acceptance by draft position</h2>",
        _by_position(select(rows, category="all")),
        *_texts(coloured),
        "<h2>What is counted</h2>",
        "<dl>" + "".join(f"<dt>{_escape(k)}</dt><dd>{_escape(v)}</dd>" for k, v in definitions.items()) + "</dl>",
        "<h2>Where this comes from</h2>",
        _provenance(meta),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_escape(title)}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _headline(chosen: Sequence[Row], rows: Sequence[Row]) -> str:
    best = {row["label"] for row in best_rows(rows)[:1]}
    head = ["row", "rule", "T", "tau", "alpha", "c", "t(g+1)/t(1)", "tok/s", "speedup", "predicted"]
    head += ["decode only", "predicted", "equal", "bigrams", "entropy", "draft MB"]
    body = []
    for row in chosen:
        cells = [
            row["label"],
            row["rule"],
            f"{row['temperature']:g}",
            tables.with_interval(row["tau"], row["tau_ci"]),
            tables.with_interval(row["alpha"], row["alpha_ci"]),
            tables.number(row["draft_cost"], 3),
            tables.number(row["t_ratio"]),
            tables.number(row["tokens_per_second"], 1),
            tables.with_interval(row["speedup"], row["speedup_ci"]),
            tables.number(row["speedup_predicted"]),
            tables.number(row["speedup_decode"]),
            tables.number(row["speedup_decode_predicted"]),
            tables.equality(row),
            tables.number(row["distinct_bigram_ratio"]),
            tables.number(row["target_entropy"]),
            tables.number(row["draft_param_bytes"] / 1e6, 1),
        ]
        body.append((cells, row["label"] in best))
    return _table(head, body)


def _by_category(rows: Sequence[Row], value: str) -> str:
    categories = [c for c in dict.fromkeys(row["category"] for row in rows) if c != "all"]
    body = []
    for label in dict.fromkeys(row["label"] for row in rows):
        cells = [next(iter(select(rows, label=label, category=c)), {}).get(value) for c in categories]
        body.append(([label, *(tables.number(cell) for cell in cells)], False))
    return _table(["row", *(c.replace("_", " ") for c in categories)], body)


def _step(chosen: Sequence[Row]) -> str:
    """Milliseconds of a step in the loop, and of its parts timed apart; what is left is the rule and the commit."""
    body = []
    for row in chosen:
        one, step = row["one_token_pass_seconds"], row["step_seconds"]
        if one is None or step is None:
            continue
        draft, scoring = row["draft_cost"] * row["draft_passes"] * one, row["t_ratio"] * one
        parts = (step, draft, scoring, step - draft - scoring, one)
        body.append(([row["label"], *(tables.number(1e3 * seconds, 1) for seconds in parts)], False))
    return _table(["ms", "step", "draft", "target pass", "the rest", "one-token pass"], body)


def _by_position(chosen: Sequence[Row]) -> str:
    width = max((len(row["alpha_by_position"]) for row in chosen), default=0)
    if not width:
        return "<p>No row drafts.</p>"
    body = [
        ([row["label"], *(tables.number(a) for a in row["alpha_by_position"]), *[""] * missing], False)
        for row in chosen
        if (missing := width - len(row["alpha_by_position"])) < width
    ]
    return _table(["row", *map(str, range(1, width + 1))], body)


def _texts(coloured: Sequence[ColouredText]) -> list[str]:
    if not coloured:
        return []
    parts = ["<h2>Drafted tokens</h2><p>Marked text was drafted and accepted; the rest the target added itself.</p>"]
    for text in coloured:
        body = "".join(f"<mark>{_escape(t)}</mark>" if drafted else _escape(t) for t, drafted in text.pieces)
        parts.append(f"<h3>{_escape(text.title)}</h3><pre class=question>{_escape(text.question)}</pre>")
        parts.append(f"<pre>{body}</pre>")
    return parts


def _provenance(meta: Mapping[str, Any]) -> str:
    facts = {name: meta[name] for name in ("created", "commit", "machine", "versions", "precision", "config")}
    lines = "".join(f"<dt>{_escape(name)}</dt><dd>{_escape(_plain(value))}</dd>" for name, value in facts.items())
    return f"<dl>{lines}</dl>"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{k}: {_plain(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(v) for v in value)
    return str(value)


def _table(head: Sequence[str], body: Sequence[tuple[Sequence[str], bool]]) -> str:
    top = "".join(f"<th>{_escape(cell)}</th>" for cell in head)
    lines = "".join(
        f"<tr{' class=best' if best else ''}>{''.join(f'<td>{_escape(cell)}</td>' for cell in cells)}</tr>"
        for cells, best in body
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def _escape(value: Any) -> str:
    return html.escape(str(value))
