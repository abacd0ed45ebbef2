"""The planner against searches that try everything."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

from specjax import analysis
from specjax.analysis import planner
from specjax.analysis.planner import Candidate, Curve, Timing

# Seconds of a target pass over T tokens: flat at first, then bound by arithmetic.
TARGET = Curve((1, 2, 4, 8, 16, 64), (1.0, 1.05, 1.1, 1.3, 2.0, 8.0))


@cache
def every_tree(nodes: int) -> tuple[tuple[int, ...], ...]:
    """Parents of all ordered trees, each once: every choice of an earlier node, or the root, for every node."""
    found = {}
    for parents in itertools.product(*(range(-1, node) for node in range(nodes))):
        found.setdefault(frozenset(paths_of(parents)), parents)
    return tuple(found.values())


def paths_of(parents: tuple[int, ...]) -> list[tuple[int, ...]]:
    """By ranks: a node's rank is its place among its siblings."""
    found: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        rank = sum(earlier == parent for earlier in parents[:node])
        found.append((*(found[parent] if parent >= 0 else ()), rank))
    return found


def brute_force(rates: np.ndarray, nodes: int, depth: int) -> float:
    """Best E of a tree of exactly so many nodes; the sum over nodes is `expected_tree_tokens`'."""
    best = -np.inf
    assert len(every_tree(6)) == 132, "the sixth Catalan number"
    for parents in every_tree(nodes):
        paths = paths_of(parents)
        if max(map(len, paths)) <= depth and max(map(max, paths)) < rates.shape[1]:
            acceptance = [rates[len(path) - 1, path[-1]] for path in paths]
            best = max(best, analysis.expected_tree_tokens(parents, acceptance))
    return best


def falling_rates(rng: np.random.Generator, depth: int, ranks: int) -> np.ndarray:
    return np.sort(rng.dirichlet(np.ones(ranks + 1), depth)[:, :ranks], axis=1)[:, ::-1]


@pytest.mark.parametrize("seed", range(4))
def test_the_dynamic_programme_finds_what_brute_force_finds(seed: int) -> None:
    rates = falling_rates(np.random.default_rng(seed), depth=4, ranks=3)
    for depth in (1, 2, 4):
        trees = planner.best_trees(rates, depth=depth, max_nodes=6)
        for nodes in range(1, 7):
            best = brute_force(rates, nodes, depth)
            assert trees.tokens[nodes] == pytest.approx(best)
            if np.isfinite(best):
                paths = trees.paths(nodes)
                assert len(paths) == nodes and max(map(len, paths)) <= depth
                assert planner.tree_tokens(rates, paths) == pytest.approx(best), "the tree gives what its entry says"
            else:
                with pytest.raises(ValueError, match=f"no tree of {nodes} nodes within depth {depth}"):
                    trees.paths(nodes)


def test_rates_that_do_not_fall_by_rank_are_taken_as_measured() -> None:
    rates = np.array([[0.1, 0.6], [0.2, 0.3]])
    trees = planner.best_trees(rates, depth=2, max_nodes=5)
    for nodes in range(1, 6):
        assert trees.tokens[nodes] == pytest.approx(brute_force(rates, nodes, 2))


def test_without_a_second_rank_the_best_tree_is_the_chain() -> None:
    trees = planner.best_trees(np.full((5, 1), 0.8), depth=5, max_nodes=8)
    assert trees.paths(4) == ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))
    assert trees.tokens[5] == pytest.approx(analysis.expected_tokens(0.8, 5))
    assert not np.isfinite(trees.tokens[6])


def test_a_tree_that_is_large_grows_as_sequoia_says() -> None:
    """The unbounded tree of acceptance p gains without end; a chain of it does not."""
    rates = np.tile([0.5, 0.2, 0.1], (8, 1))
    trees = planner.best_trees(rates, depth=8, max_nodes=64)
    gains = np.diff(trees.tokens)
    assert (gains > 0).all() and (np.diff(gains) < 1e-9).all(), "each node adds, and less than the one before"
    assert trees.tokens[64] > 2.5 > analysis.expected_tokens(0.5, 64)


def chain_candidate(alpha: float, c: float, depth: int = 12) -> Candidate:
    drafting = Curve(tuple(range(1, depth + 1)), tuple(c * k for k in range(1, depth + 1)))
    return Candidate("draft", np.full((depth, 1), alpha), drafting)


@pytest.mark.parametrize(("alpha", "c"), [(0.8, 0.05), (0.6, 0.02), (0.9, 0.2), (0.3, 0.1)])
def test_gamma_is_that_of_an_exhaustive_sweep(alpha: float, c: float) -> None:
    sweep = [
        analysis.speedup_predicted(alpha, g, draft_passes=g, c=c, t_ratio=TARGET(g + 1) / TARGET(1)) for g in range(13)
    ]
    made = planner.plan([chain_candidate(alpha, c)], TARGET)
    assert made.num_nodes == int(np.argmax(sweep)) and made.is_chain
    assert made.speedup == pytest.approx(max(sweep))
    chosen = analysis.optimal_gamma(alpha, c=c, t_ratio=lambda g: TARGET(g + 1) / TARGET(1), max_gamma=12)
    assert made.num_nodes == chosen.gamma


def test_size_and_depth_are_those_of_an_exhaustive_search() -> None:
    rates = falling_rates(np.random.default_rng(7), depth=4, ranks=3)
    target = Curve((1, 7), (1.0, 1.3))
    candidate = Candidate("heads", rates, Curve((1, 4), (0.1, 0.4)), overhead=0.05)
    best = max(
        brute_force(rates, n, d) * target(1) / (0.1 * d + 0.05 + target(n + 1))
        for n in range(1, 7)
        for d in (1, 2, 3, 4)
    )
    made = planner.plan([candidate], target, max_nodes=6)
    assert made.speedup == pytest.approx(best) and best > 1
    assert made.speedup == pytest.approx(made.expected_tokens * target(1) / made.step_seconds)
    assert analysis.expected_tree_tokens(
        made.parents, [rates[len(path) - 1, path[-1]] for path in made.paths]
    ) == pytest.approx(made.expected_tokens)


@pytest.mark.pitfall("sglang#4759", "SpecForge#164", "vllm-ascend#16638", "sglang#13376")
def test_speculation_ends_where_the_batch_makes_it_slower() -> None:
    """The same drafter: long drafts at batch 1, shorter ones at 8, none at 64."""
    timings = [
        Timing(tokens, batch, 128, max(1.0, tokens * batch / 40)) for batch in (1, 8, 64) for tokens in (1, 2, 3, 5, 9)
    ]
    chosen = {
        b: planner.plan([chain_candidate(0.7, 0.05)], planner.target_curve(timings, batch=b, context=128))
        for b in (1, 8, 64)
    }
    assert chosen[1].num_nodes > chosen[8].num_nodes > 0 == chosen[64].num_nodes
    assert chosen[64].method == planner.PLAIN and all(made.speedup >= 1 for made in chosen.values())
    with pytest.raises(ValueError, match=r"no target pass was timed at batch 2, context 128; there are \[\(1, 128\)"):
        planner.target_curve(timings, batch=2, context=128)


def test_noise_makes_no_wider_pass_cheaper() -> None:
    timings = [Timing(tokens, 1, 64, seconds) for tokens, seconds in ((4, 0.9), (1, 1.0), (8, 1.2))]
    curve = planner.target_curve(timings, batch=1, context=64)
    assert (curve.counts, curve.seconds) == ((1, 4, 8), (1.0, 1.0, 1.2))


def test_a_bad_drafter_gives_plain_decoding() -> None:
    bad, good = chain_candidate(0.2, 0.4), chain_candidate(0.7, 0.05)
    made = planner.plan([bad], TARGET)
    assert (made.method, made.paths, made.parents, made.speedup) == (planner.PLAIN, (), (), 1.0)
    assert planner.plan([], TARGET).method == planner.PLAIN
    assert planner.plan([bad, good], TARGET).method == "draft"
    sure = planner.plan([good], TARGET)
    assert planner.plan([good], TARGET, margin=sure.speedup - 1 + 1e-6).method == planner.PLAIN
    assert planner.plan([good], TARGET, margin=sure.speedup - 1 - 1e-6).paths == sure.paths


def test_the_better_of_two_methods() -> None:
    cheap = Candidate("lookup", np.full((6, 1), 0.5), Curve((1, 6), (0.001, 0.001)))
    dear = chain_candidate(0.7, 0.5)
    assert planner.plan([dear, cheap], TARGET).method == "lookup"
    assert planner.predict(dear, [(0,)], TARGET).speedup == pytest.approx(1.7 / (0.5 + 1.05))


# --- Stopping ---


def test_a_threshold_on_two_kinds_of_passes() -> None:
    """Half of the drafts are sure (each token lives), half are lost: stop after the first token of the lost ones."""
    survival = np.array([[0.9, 0.85, 0.8, 0.75]] * 3 + [[0.1, 0.0, 0.0, 0.0]] * 3)
    drafting, target = Curve((1, 4), (0.1, 0.4)), Curve((1, 5), (1.0, 1.2))
    stop = planner.stop_threshold(survival, survival, drafting=drafting, target=target)
    assert 0.1 < stop.threshold <= 0.8
    assert stop.mean_length == pytest.approx((4 + 1) / 2)
    tokens = ((1 + 0.9 + 0.85 + 0.8 + 0.75) + (1 + 0.1)) / 2
    seconds = ((0.4 + 1.2) + (0.1 + 1.05)) / 2
    assert (stop.expected_tokens, stop.speedup) == pytest.approx((tokens, tokens / seconds))
    never = planner.predict(Candidate("d", np.array([[0.5], [0.85], [0.94], [0.94]]), drafting), [(0,)], target)
    assert stop.speedup > never.speedup


def test_the_threshold_is_the_best_of_all() -> None:
    rng = np.random.default_rng(0)
    survival = np.cumprod(rng.beta(3, 1, (200, 6)), axis=1)
    confidence = np.minimum.accumulate(np.clip(survival + rng.normal(0, 0.05, survival.shape), 0, 1), axis=1)
    drafting, target = Curve((1, 6), (0.15, 0.9)), Curve((1, 7), (1.0, 1.6))
    stop = planner.stop_threshold(confidence, survival, drafting=drafting, target=target)

    def rate(threshold: float) -> float:
        tokens = seconds = 0.0
        for seen, lives in zip(confidence, survival, strict=True):
            length = 1
            while length < 6 and seen[length - 1] >= threshold:
                length += 1
            tokens += 1 + lives[:length].sum()
            seconds += drafting(length) + target(length + 1)
        return tokens / seconds

    assert stop.speedup == pytest.approx(rate(stop.threshold))
    assert stop.speedup >= max(rate(t) for t in np.linspace(0, 1, 201)) - 1e-3
    assert stop.speedup > rate(0.0) and stop.speedup > rate(1.0)


def test_dropping_the_unsure_token_narrows_the_pass_and_still_pays_for_its_draft() -> None:
    survival = np.array([[0.9, 0.85, 0.8]] * 2 + [[0.1, 0.0, 0.0]] * 2)
    sure = np.array([[0.9, 0.9, 0.9]] * 2 + [[0.3, 0.2, 0.2]] * 2)
    drafting, target = Curve((1, 3), (0.1, 0.3)), Curve((1, 4), (1.0, 1.6))
    stop = planner.stop_threshold(sure, survival, drafting=drafting, target=target, unsure="dropped")
    assert stop.threshold == 0.9 and stop.mean_length == pytest.approx(1.5)
    tokens, seconds = ((1 + 0.9 + 0.85 + 0.8) + 1) / 2, ((0.3 + 1.6) + (0.1 + 1.0)) / 2
    assert (stop.expected_tokens, stop.speedup) == pytest.approx((tokens, tokens / seconds))
    kept = planner.stop_threshold(sure, survival, drafting=drafting, target=target)
    assert kept.speedup == pytest.approx((tokens + 0.05) / (seconds + 0.1)) and kept.speedup < stop.speedup


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Curve((1, 1), (1.0, 1.0)), r"counts \(1, 1\); expected rising"),
        (lambda: Curve((1,), (float("nan"),)), "expected finite times"),
        (lambda: Curve((), ()), "0 counts and 0 times"),
        (lambda: TARGET(65), "no time for 65: measured from 1 to 64"),
        (lambda: planner.best_trees([[0.7, 0.6]], depth=1, max_nodes=2), "sum to at most 1"),
        (lambda: planner.best_trees([0.7], depth=1, max_nodes=2), r"shape \(1,\)"),
        (lambda: planner.best_trees([[0.7]], depth=2, max_nodes=2), "depth 2, max_nodes 2: expected 1..1"),
        (lambda: planner.tree_tokens([[0.7]], [(0, 0)]), r"path \(0, 0\) lies outside"),
        (
            lambda: planner.stop_threshold([[0.5, 0.9]], [[0.5, 0.4]], drafting=TARGET, target=TARGET),
            "confidences must be running values",
        ),
        (lambda: planner.stop_threshold([[0.5]], [[0.5, 0.4]], drafting=TARGET, target=TARGET), "expected the same"),
    ],
)
def test_bad_input_gets_one_clear_error(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()
