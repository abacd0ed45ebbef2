"""A pass as wide as the draft: one program that scores and verifies a draft at one of a few static widths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoding.draft import Draft, Scores, Verdict, Widths
from specjax.models import KVCache

# judge(draft, cache) -> (scores, verdict, cache)
Judge = Callable[[Draft, KVCache], tuple[Scores, Verdict, KVCache]]


def fitting(valid_bn: jax.Array, sizes: tuple[int, ...]) -> Widths:
    """The smallest of some growing widths that holds every valid node; the last must be the draft's own."""
    needed = jnp.max(jnp.where(valid_bn, jnp.arange(1, valid_bn.shape[1] + 1), 0))
    return Widths(jnp.sum(jnp.asarray(sizes, jnp.int32) < needed).astype(jnp.int32), sizes)


def stop_widths(num_nodes: int, *, plain: bool) -> tuple[int, ...]:
    """Widths for a chain that may stop early: its own, half of it, and 0 (a plain pass) or else 1."""
    return tuple(sorted({0 if plain else 1, -(-num_nodes // 2), num_nodes}))


def at_width(judge: Judge, draft: Draft, cache: KVCache, depth: int) -> tuple[Scores, Verdict, KVCache]:
    """What `judge` says of a draft, from a pass over as many nodes as `draft.widths` chose.

    Nodes behind that width must be invalid. What belongs to them in the scores is zero.

    Args:
        judge: scores and verifies.
        draft: with `widths`, or None there for a pass over all nodes.
        cache: of the target.
        depth: D of the drafter.
    """
    if draft.widths is None:
        return judge(draft, cache)

    def branch(width: int) -> Callable[[KVCache], tuple[tuple[Scores, Verdict], KVCache]]:
        def run(cache: KVCache) -> tuple[tuple[Scores, Verdict], KVCache]:
            scores, verdict, cache = judge(_narrow(draft, width), cache)
            return (_widen(scores, draft.num_nodes + 1), _deepen(verdict, depth)), cache

        return run

    branches = [branch(width) for width in draft.widths.sizes]
    (scores, verdict), cache = switch_in_place(draft.widths.choice, branches, cache)
    return scores, verdict, cache


def switch_in_place(
    choice: jax.Array, branches: Sequence[Callable[[Any], tuple[Any, Any]]], carry: Any
) -> tuple[Any, Any]:
    """`lax.switch` for branches that change a large carry, a cache, where it lies.

    XLA copies all that goes through a conditional. Here each branch is the body of a loop that runs once or not at all.

    Args:
        choice: int32 scalar, index into `branches`.
        branches: carry -> (out, carry); outs and carries of one structure and shapes.
        carry: what they change.

    Returns:
        `(out, carry)` of the chosen branch.
    """

    def once(index: int, found: tuple[Any, Any]) -> tuple[Any, Any]:
        def body(going: tuple[jax.Array, tuple[Any, Any]]) -> tuple[jax.Array, tuple[Any, Any]]:
            return jnp.zeros((), bool), branches[index](going[1][1])

        return jax.lax.while_loop(lambda going: going[0], body, (choice == index, found))[1]

    shapes = jax.eval_shape(branches[0], carry)[0]
    found = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), carry
    for index in range(len(branches)):
        found = once(index, found)
    return found


def _narrow(draft: Draft, width: int) -> Draft:
    """The first nodes of a draft; with none of them verification is a plain pass through all layers."""
    resume = draft.resume
    if resume is not None:
        resume = dataclasses.replace(resume, hidden=resume.hidden[:, : width + 1]) if width else None
    return dataclasses.replace(
        draft,
        tokens=draft.tokens[:, :width],
        parents=draft.parents[:, :width],
        valid=draft.valid[:, :width],
        law=draft.law[:, :width],
        widths=None,
        resume=resume,
        is_chain=draft.is_chain or not width,
    )


def _widen(scores: Scores, nodes: int) -> Scores:
    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, nodes - x.shape[1])] + [(0, 0)] * (x.ndim - 2))

    return jax.tree.map(pad, scores)


def _deepen(verdict: Verdict, depth: int) -> Verdict:
    missing = [(0, 0), (0, depth - verdict.path.shape[1])]
    return dataclasses.replace(
        verdict,
        path=jnp.pad(verdict.path, missing, constant_values=-1),
        overlap=jnp.pad(verdict.overlap, missing, constant_values=jnp.nan),
    )
