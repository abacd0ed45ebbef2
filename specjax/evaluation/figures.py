"""Plots of results as PNG images."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specjax.evaluation.results import select

Row = Mapping[str, Any]
BLUE, GREEN, RED, INK = "#4878a8", "#6aa56e", "#d1603d", "#222222"


@dataclass(frozen=True)
class Point:
    """One contender on one prompt: the entropy of the target's laws there, and the acceptance."""

    label: str
    prompt: str
    entropy: float
    alpha: float


def plot(rows: Sequence[Row]) -> bytes:
    """Speedup with its interval and its prediction beside it, and tau, a bar a contender."""
    chosen = select(rows, category="all")
    labels = [row["label"] for row in chosen]
    places = range(len(chosen))
    figure = Figure(figsize=(11, 1.6 + 0.42 * len(chosen)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)

    values = [row["speedup"] or 0.0 for row in chosen]
    left.barh(places, values, 0.62, xerr=_errors(chosen, "speedup"), color=BLUE, ecolor=INK, capsize=3)
    predicted = [(place, row["speedup_predicted"]) for place, row in zip(places, chosen, strict=True)]
    predicted = [(place, value) for place, value in predicted if value is not None]
    if predicted:
        at, value = zip(*predicted, strict=True)
        left.plot(value, at, "D", color=RED, markersize=7, label="predicted speedup")
        figure.legend(loc="outside upper right", frameon=False)
    left.axvline(1.0, color=INK, linewidth=1, linestyle=":")
    left.set_xlabel("speedup over plain decoding")

    tau = [row["tau"] or 0.0 for row in chosen]
    right.barh(places, tau, 0.62, xerr=_errors(chosen, "tau"), color=GREEN, ecolor=INK, capsize=3)
    right.axvline(1.0, color=INK, linewidth=1, linestyle=":")
    right.set_xlabel("tau: tokens per target pass")

    left.set_yticks(list(places), labels)
    left.invert_yaxis()
    return _png(figure)


def acceptance_plot(rows: Sequence[Row]) -> bytes | None:
    """Acceptance by draft position, a line a contender; None where nothing drafts."""
    chosen = [row for row in select(rows, category="all") if any(a is not None for a in row["alpha_by_position"])]
    if not chosen:
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for row in chosen:
        known = [(k, a) for k, a in enumerate(row["alpha_by_position"], start=1) if a is not None]
        axes.plot(*zip(*known, strict=True), "o-", label=row["label"], markersize=5)
    axes.set(xlabel="draft position", ylabel="acceptance, given that all before it were accepted", ylim=(0, 1.02))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, axes, len(chosen))
    return _png(figure)


def prediction_plot(rows: Sequence[Row]) -> bytes | None:
    """Measured against predicted speedup with the band of 10 %; None where nothing is predicted."""
    chosen = [r for r in select(rows, category="all") if r["speedup_predicted"] and r["speedup"] is not None]
    if not chosen:
        return None
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    most = 1.05 * max(max(r["speedup"], r["speedup_predicted"], *(r["speedup_ci"] or ())) for r in chosen)
    axes.plot([0, most], [0, most], color=INK, linewidth=1)
    axes.fill_between([0, most], [0, 0.9 * most], [0, 1.1 * most], color=INK, alpha=0.08, linewidth=0)
    for row in chosen:
        errors = [[side[0]] for side in _errors([row], "speedup")]
        axes.errorbar(row["speedup_predicted"], row["speedup"], yerr=errors, fmt="o", capsize=3, label=row["label"])
    axes.set(xlabel="predicted speedup", ylabel="measured speedup", xlim=(0, most), ylim=(0, most))
    _legend(figure, axes, len(chosen))
    return _png(figure)


def entropy_plot(points: Sequence[Point]) -> bytes | None:
    """Acceptance against the target's entropy, a point a prompt and contender; None without points."""
    if not points:
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    labels = list(dict.fromkeys(point.label for point in points))
    for label in labels:
        mine = [point for point in points if point.label == label]
        axes.plot([p.entropy for p in mine], [p.alpha for p in mine], "o", label=label, alpha=0.75, markersize=6)
    axes.set(xlabel="entropy of the target's law, nats, mean over the answer", ylabel="alpha", ylim=(-0.02, 1.02))
    _legend(figure, axes, len(labels))
    return _png(figure)


def _errors(rows: Sequence[Row], name: str) -> list[list[float]]:
    """Distances from value to interval, as matplotlib takes them."""
    low, high = [], []
    for row in rows:
        value, interval = row[name], row[f"{name}_ci"]
        known = value is not None and interval is not None
        low.append(max(value - interval[0], 0.0) if known else 0.0)
        high.append(max(interval[1] - value, 0.0) if known else 0.0)
    return [low, high]


def _legend(figure: Figure, axes: Any, entries: int) -> None:
    if entries <= 20:  # more would be larger than the plot, and the table names them
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)


def _png(figure: Figure) -> bytes:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        # A label is text: a dollar sign in it is no formula.
        for text in (*axes.get_yticklabels(), *(t for legend in figure.legends for t in legend.get_texts())):
            text.set_parse_math(False)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=130)
    return out.getvalue()
