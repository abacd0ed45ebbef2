"""Drafts of the exact oracles (fractions) as the arrays that compiled rules take, many rows of each.

A case is one realised draft on one pair of random tables; the oracle gives the exact probability of every outcome.
"""

from __future__ import annotations

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np

from specjax import analysis
from specjax.analysis import g_test
from specjax.decoding import Draft, Scores, make_sampling
from specjax.decoding.tree import depths
from specjax.testing.laws import step_keys
from tests.analysis.tables import random_table

VOCAB, TABLES, DRAWS = 4, 16, 1 << 12


@dataclasses.dataclass(frozen=True)
class Case:
    """A realised draft, the target's law behind root and nodes, and what the oracle says."""

    tree: analysis.DraftTree
    laws: tuple[tuple, ...]
    outcomes: dict


def make_cases(reference: str, parents: tuple[int, ...], siblings: str = "iid", one_hot: bool = False) -> list[Case]:
    """One draft on each of the random tables, drawn as `siblings` says, or chosen."""
    cases = []
    for seed in range(TABLES):
        target = random_table(f"p{seed}", VOCAB)
        draft = random_table(f"q{seed}", VOCAB, positive=True)
        if one_hot:
            rng = random.Random(seed)
            draws = analysis.fixed_draws(lambda context, rank, rng=rng: rng.randrange(VOCAB), parents, VOCAB)
            tree = next(iter(draws(())))[1]
        else:
            weighted = list(analysis.sampled_draws(draft, parents, siblings)(()))
            tree = random.Random(seed).choices([t for _, t in weighted], [float(w) for w, _ in weighted])[0]
        paths = [()] + [analysis.enumeration.path_to(parents, node) for node in range(len(parents))]
        laws = tuple(tuple(target(tuple(tree.tokens[n] for n in path))) for path in paths)
        cases.append(Case(tree, laws, analysis.REFERENCE_RULES[reference](tree, target)))
    return cases


def arrays(cases: list[Case], is_chain: bool, one_hot: bool = False) -> tuple[Draft, Scores]:
    """All cases, `DRAWS` rows of each; every node has a law of its own."""

    def rows(values, dtype):
        return jnp.asarray(np.repeat(np.asarray(values, dtype), DRAWS, axis=0))

    nodes = len(cases[0].tree.tokens)
    with np.errstate(divide="ignore"):
        logits = np.log(np.array([case.laws for case in cases], np.float64))
        laws = np.log(np.array([case.tree.laws for case in cases], np.float64))
    parents = rows([case.tree.parents for case in cases], np.int32)
    index = np.arange(nodes) if not one_hot else np.full(nodes, -1)
    draft = Draft(
        tokens=rows([case.tree.tokens for case in cases], np.int32),
        parents=parents,
        valid=jnp.ones(parents.shape, bool),
        law=rows([index] * len(cases), np.int32),
        laws=rows(laws if not one_hot else np.zeros((len(cases), 0, 1)), np.float32),
        is_chain=is_chain,
    )
    logits = rows(logits, np.float32)
    return draft, Scores(logits, jnp.argmax(logits, -1).astype(jnp.int32), depths(parents), {})


def check(rule, cases: list[Case], is_chain: bool = False, one_hot: bool = False) -> None:
    """The compiled rule's outcomes, accepted nodes and next token, have the probabilities that the oracle gives."""
    draft, scores = arrays(cases, is_chain, one_hot)
    keys = step_keys(len(cases) * DRAWS, 7)
    sampling = jax.tree.map(lambda x: jnp.broadcast_to(x, keys.length.shape), make_sampling([1.0]))
    verdict = jax.jit(rule.verify)(draft, scores, sampling, keys)
    path, count = np.asarray(verdict.path), np.asarray(verdict.num_accepted)
    found = np.stack([np.where(count > 0, path[np.arange(len(path)), count - 1], -1), verdict.next_token], 1)
    nodes = len(cases[0].tree.tokens)
    expected_mean, mean = 0.0, float(count.mean())
    for i, case in enumerate(cases):
        law = np.zeros((nodes + 1, VOCAB))
        for (accepted, token), chance in case.outcomes.items():
            law[(accepted[-1] if accepted else -1) + 1, token] += float(chance)
            expected_mean += float(chance) * len(accepted) / len(cases)
            if accepted:  # The path is the whole way from the root.
                hit = found[i * DRAWS : (i + 1) * DRAWS, 0] == accepted[-1]
                assert (path[i * DRAWS : (i + 1) * DRAWS][hit][:, : len(accepted)] == accepted).all()
        counts = np.zeros_like(law, np.int64)
        np.add.at(counts, (found[i * DRAWS : (i + 1) * DRAWS, 0] + 1, found[i * DRAWS : (i + 1) * DRAWS, 1]), 1)
        if (law > 0).sum() == 1:
            assert counts[law > 0] == DRAWS
        else:
            assert not counts[law == 0].any(), (i, case.tree.tokens)
            p_value = g_test(counts[law > 0], law[law > 0] / law.sum()).p_value
            assert p_value > 1e-6, (i, case.tree.tokens, p_value)
    assert abs(mean - expected_mean) < 5 * count.std() / np.sqrt(count.size)
