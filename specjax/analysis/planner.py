"""What to draft: method, draft length or static tree, and when to stop, from measured acceptance and measured costs.

Everything maximises tokens per second. A draft of n nodes and depth d takes `drafting(d)` seconds, the pass that
verifies it `t(n + 1)`, and it gives E tokens, so that over plain decoding's `1 / t(1)` it is worth

    speedup = E t(1) / (drafting(d) + t(n + 1) + overhead)

which for a chain of gamma tokens by a draft model is `E / ((gamma or gamma + 1) c + t(gamma + 1) / t(1))`. Plain
decoding is always among the choices.

Acceptance is an array `[D, R]`: the chance that the child of rank r of an accepted node at depth d is the one that is
accepted. Children exclude each other, so a row sums to at most 1; a chain has one column.

Shapes: `d` depth, `r` rank among siblings, `n` positions or passes, `g` draft positions, `v` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

Array = np.ndarray
# A node by the ranks on its way from the root: (0, 2) is the third child of the first.
Path = tuple[int, ...]

# --- Costs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Seconds by a count (tokens of a target pass, depth of a draft), linear between the counts that were measured.

    Attributes:
        counts: measured counts, rising.
        seconds: at each of them.

    Raises:
        ValueError: no points, lengths that differ, counts that do not rise, or seconds that are no time.
    """

    counts: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.counts or len(self.counts) != len(self.seconds):
            raise ValueError(f"{len(self.counts)} counts and {len(self.seconds)} times; expected as many, at least one")
        if (np.diff(self.counts) <= 0).any() or self.counts[0] < 1:
            raise ValueError(f"counts {self.counts}; expected rising numbers from 1")
        if not all(np.isfinite(s) and s >= 0 for s in self.seconds):
            raise ValueError(f"seconds {self.seconds}; expected finite times >= 0")

    def __call__(self, count: int) -> float:
        """Seconds at a count.

        Raises:
            ValueError: outside of what was measured.
        """
        if not self.counts[0] <= count <= self.counts[-1]:
            raise ValueError(f"no time for {count}: measured from {self.counts[0]} to {self.counts[-1]}; measure it")
        return float(np.interp(count, self.counts, self.seconds))


@dataclass(frozen=True)
class Timing:
    """One measured target pass: `tokens` in each of `batch` rows behind `context` cached ones."""

    tokens: int
    batch: int
    context: int
    seconds: float


def target_curve(timings: Sequence[Timing], *, batch: int, context: int) -> Curve:
    """`t(T)` at one batch size and context length.

    A wider pass does no less work: where it was timed as the faster one, that is noise, and it is given the time of the
    narrower one.

    Raises:
        ValueError: no pass was timed there; lists where some were.
    """
    here = sorted((t.tokens, t.seconds) for t in timings if (t.batch, t.context) == (batch, context))
    if not here:
        known = sorted({(t.batch, t.context) for t in timings})
        raise ValueError(f"no target pass was timed at batch {batch}, context {context}; there are {known}")
    seconds = np.maximum.accumulate([seconds for _, seconds in here])
    return Curve(tuple(tokens for tokens, _ in here), tuple(seconds.tolist()))


# --- Trees ---------------------------------------------------------------------------------------------


def tree_tokens(acceptance_dr: ArrayLike, paths: Sequence[Path]) -> float:
    """E of a tree, bonus included: one and, for each node, the product of acceptances along its path.

    Raises:
        ValueError: a path is deeper or a rank higher than the acceptances go.
    """
    rates = _acceptance(acceptance_dr)
    for path in paths:
        if len(path) > len(rates) or max(path) >= rates.shape[1]:
            raise ValueError(f"path {path} lies outside of the acceptances {rates.shape} by depth and rank")
    return float(1.0 + sum(np.prod([rates[depth, rank] for depth, rank in enumerate(path)]) for path in paths))


@dataclass(frozen=True, eq=False)
class BestTrees:
    """The best tree of every size within a depth.

    Attributes:
        tokens: E of the best tree of n draft nodes at index n, -inf where no tree of n nodes fits.
        depth: the limit.
    """

    tokens: Array
    depth: int
    _last: tuple[Array, ...]  # by depth: size of what is kept before the last child, [R + 1, N + 2]
    _children: tuple[Array, ...]  # by depth: best number of children, [N + 2]

    def paths(self, nodes: int) -> tuple[Path, ...]:
        """The nodes of the best tree of this size, by depth and then by path.

        Raises:
            ValueError: there is no tree of this size.
        """
        if not 0 <= nodes < self.tokens.size or not np.isfinite(self.tokens[nodes]):
            raise ValueError(f"no tree of {nodes} nodes within depth {self.depth} and the ranks that were measured")
        found: list[Path] = []

        def grow(path: Path, size: int, children: int) -> None:
            for rank in reversed(range(children)):
                kept = int(self._last[len(path)][rank + 1, size])
                child = (*path, rank)
                found.append(child)
                below = self._children[len(child)][size - kept] if len(child) < self.depth else 0
                grow(child, size - kept, int(below))
                size = kept

        if nodes:
            grow((), nodes + 1, int(self._children[0][nodes + 1]))
        return tuple(sorted(found, key=lambda path: (len(path), path)))


def best_trees(acceptance_dr: ArrayLike, *, depth: int, max_nodes: int) -> BestTrees:
    """The best static trees of 0..max_nodes nodes within a depth, by dynamic programming over size and children.

    Sequoia's recurrence (Chen et al. 2024, section 3.1), here with acceptances that may differ by depth:

        T[d, m, b] = max over y of T[d, y, b - 1] + p[d, b - 1] max_b' T[d + 1, m - y, b']

    the best subtree of m nodes, its root included, whose root lies at depth d and has b children, of ranks 0..b-1.

    Args:
        acceptance_dr: `[D, R]`, see the module.
        depth: limit, 1..D.
        max_nodes: draft nodes of the largest tree.
    """
    rates = _acceptance(acceptance_dr)
    if not 1 <= depth <= len(rates) or max_nodes < 1:
        raise ValueError(f"depth {depth}, max_nodes {max_nodes}: expected 1..{len(rates)} and at least 1")
    size, ranks = max_nodes + 2, rates.shape[1]
    leaf = np.full(size, -np.inf)
    leaf[1] = 1.0
    best, last, children = leaf, [], []
    for row in rates[:depth][::-1]:
        by_count, before = [leaf], np.zeros((ranks + 1, size), np.int64)
        for rank, rate in enumerate(row):
            gain = np.where(np.isfinite(best), rate * np.where(np.isfinite(best), best, 0.0), -np.inf)
            grown = np.full(size, -np.inf)
            for m in range(2, size):
                sums = by_count[-1][1:m] + gain[m - 1 : 0 : -1]
                at = int(np.argmax(sums))
                grown[m], before[rank + 1, m] = sums[at], at + 1
            by_count.append(grown)
        children.append(np.argmax(by_count, axis=0))
        last.append(before)
        best = np.max(by_count, axis=0)
    return BestTrees(best[1:], depth, tuple(last[::-1]), tuple(children[::-1]))


# --- The choice ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Candidate:
    """A drafter as the planner sees it.

    Attributes:
        method: what it is called.
        acceptance_dr: `[D, R]`, see the module; R is 1 for a drafter that only makes chains.
        drafting: seconds of all draft passes of a step, by the draft's depth.
        overhead: seconds of a step beyond drafting and the target pass, over those of a plain step (rule, commit).
    """

    method: str
    acceptance_dr: Array
    drafting: Curve
    overhead: float = 0.0

    @property
    def depth(self) -> int:
        """Deepest draft whose acceptance and cost are known."""
        return min(len(_acceptance(self.acceptance_dr)), self.drafting.counts[-1])


PLAIN = "autoregressive"


@dataclass(frozen=True)
class Plan:
    """What to draft in every step, and what it is predicted to give.

    Attributes:
        method: of the candidate, `autoregressive` where nothing pays.
        paths: nodes of the draft, by depth and then by path; empty for plain decoding.
        expected_tokens: E, bonus included.
        step_seconds: of a step.
        speedup: over plain decoding.
    """

    method: str
    paths: tuple[Path, ...]
    expected_tokens: float
    step_seconds: float
    speedup: float

    @property
    def num_nodes(self) -> int:
        """Draft tokens a step; gamma of a chain."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Longest path."""
        return max(map(len, self.paths), default=0)

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return self.num_nodes == self.depth

    @property
    def parents(self) -> tuple[int, ...]:
        """Parent of each node, -1 for children of the root."""
        index = {path: node for node, path in enumerate(self.paths)}
        return tuple(index.get(path[:-1], -1) for path in self.paths)


def predict(candidate: Candidate, paths: Sequence[Path], target: Curve) -> Plan:
    """What a draft of these nodes gives: see the module for the formula.

    Raises:
        ValueError: acceptance or a time is not known that far.
    """
    paths = tuple(sorted(paths, key=lambda path: (len(path), path)))
    if not paths:
        return Plan(PLAIN, (), 1.0, target(1), 1.0)
    expected = tree_tokens(candidate.acceptance_dr, paths)
    seconds = candidate.drafting(len(paths[-1])) + target(len(paths) + 1) + candidate.overhead
    return Plan(candidate.method, paths, expected, seconds, expected * target(1) / seconds)


def plan(candidates: Sequence[Candidate], target: Curve, *, max_nodes: int = 64, margin: float = 0.0) -> Plan:
    """The draft of the highest predicted speedup over all candidates, sizes and depths; the smallest among equals.

    Args:
        candidates: drafters; none gives plain decoding.
        target: seconds of a target pass by tokens a row; sizes are limited to what it covers.
        max_nodes: largest draft.
        margin: speedups up to `1 + margin` do not pay.
    """
    best, bar = Plan(PLAIN, (), 1.0, target(1), 1.0), 1.0 + margin
    most = min(max_nodes, target.counts[-1] - 1)
    for candidate in candidates:
        for depth in range(candidate.drafting.counts[0], candidate.depth + 1):
            if most < depth:
                break
            trees = best_trees(candidate.acceptance_dr, depth=depth, max_nodes=most)
            sizes = [n for n in range(1, most + 1) if np.isfinite(trees.tokens[n])]
            fixed = candidate.drafting(depth) + candidate.overhead
            speedups = [trees.tokens[n] * target(1) / (fixed + target(n + 1)) for n in sizes]
            at = int(np.argmax(speedups))
            # A small excess is the rounding of equal sums taken in another order.
            if speedups[at] > bar * (1 + 1e-12):
                best = predict(candidate, trees.paths(sizes[at]), target)
                bar = max(bar, best.speedup)
    return best


# --- Adaptive length -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stop:
    """When to stop drafting: at the first token with which the confidence is below `threshold`; 0 never stops early.

    Attributes:
        threshold: on the running confidence.
        mean_length: draft tokens that are verified a step.
        expected_tokens: E.
        speedup: over plain decoding.
    """

    threshold: float
    mean_length: float
    expected_tokens: float
    speedup: float


def stop_threshold(
    confidence_ng: ArrayLike,
    survival_ng: ArrayLike,
    *,
    drafting: Curve,
    target: Curve,
    unsure: Literal["kept", "dropped"] = "kept",
    most: int = 512,
) -> Stop:
    """The threshold of the highest tokens per second over recorded drafts, by trying every one that differs.

    A step drafts until the running confidence falls below the threshold. Tokens per second are mean tokens over mean
    seconds of a step, the long-run rate of a renewal process.

    Args:
        confidence_ng: `[n, G]` the draft's own confidence up to each token, as it will see it: the running product, or
            the running minimum, of the tokens' probabilities.
        survival_ng: `[n, G]` chance (or whether) the target accepts tokens 1..k.
        drafting: seconds by draft length, from 1 to G.
        target: seconds by tokens of a pass, from 1 to G + 1.
        unsure: whether the token that falls below is verified too, or dropped after its draft pass. Keeping it leaves
            the output law alone whatever the confidence is made of; dropping it only where the confidence does not
            depend on which token was drawn.
        most: thresholds tried; above, quantiles of the confidences.

    Raises:
        ValueError: shapes differ, or a running value rises or leaves [0, 1].
    """
    seen, lives = np.asarray(confidence_ng, np.float64), np.asarray(survival_ng, np.float64)
    if seen.ndim != 2 or not seen.size or seen.shape != lives.shape:
        raise ValueError(f"confidences {seen.shape} and survivals {lives.shape}; expected the same [passes, positions]")
    for name, values in (("confidences", seen), ("survivals", lives)):
        if not ((values >= 0) & (values <= 1 + 1e-6)).all() or (np.diff(values, axis=1) > 1e-6).any():
            raise ValueError(f"{name} must be running values: in [0, 1] and falling along a draft")
    longest = seen.shape[1]
    tokens_l = np.concatenate([np.ones((len(lives), 1)), 1.0 + lives.cumsum(axis=1)], axis=1)
    draft_l = np.array([0.0] + [drafting(k) for k in range(1, longest + 1)])
    target_l = np.array([target(k + 1) for k in range(longest + 1)])
    values = np.unique(seen)
    if values.size > most:
        values = np.unique(np.quantile(values, np.linspace(0, 1, most)))
    best = None
    for threshold in (0.0, *values):
        sure = (seen >= threshold).sum(axis=1)
        passes = np.minimum(sure + 1, longest)
        lengths = passes if unsure == "kept" else sure
        expected = tokens_l[np.arange(len(lengths)), lengths].mean()
        speedup = expected * target(1) / (draft_l[passes] + target_l[lengths]).mean()
        if best is None or speedup > best.speedup * (1 + 1e-12):
            best = Stop(float(threshold), float(lengths.mean()), float(expected), float(speedup))
    assert best is not None
    return best


def _acceptance(acceptance_dr: ArrayLike) -> Array:
    rates = np.asarray(acceptance_dr, np.float64)
    if rates.ndim != 2 or not rates.size:
        raise ValueError(f"acceptance has shape {rates.shape}; expected [depths, ranks], both at least 1")
    if not ((rates >= 0) & (rates <= 1)).all() or (rates.sum(axis=1) > 1 + 1e-6).any():
        raise ValueError(
            f"acceptance {rates.round(3).tolist()}: expected rates in [0, 1] that sum to at most 1 over the ranks of a "
            "depth (the chance of each child, not the chance given that its earlier siblings failed)"
        )
    return rates
