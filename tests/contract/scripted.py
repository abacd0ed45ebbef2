"""A drafter that is right where a test says so: any acceptance, along any path of a tree, on a real model."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax.numpy as jnp
import numpy as np

from specjax.decoding import Completion, Request, Stateless, TreeSpec
from specjax.drafting import Autoregressive
from specjax.testing import contract
from specjax.testing.subject import Subject
from tests.drafting import common

ROWS = 3


@dataclasses.dataclass(frozen=True)
class Scripted(Stateless):
    """Drafts what plain decoding will write at the nodes that are right, and something else at the others.

    A request is known by its first token. `tables` hold texts `[R, L]`, and where their drafts are right `[R, L]`.
    """

    spec: TreeSpec
    right: tuple[int, ...]
    taps: tuple = ()
    num_probes: int = 0

    @property
    def num_nodes(self):
        return self.spec.num_nodes

    @property
    def depth(self):
        return self.spec.depth

    def kind(self, sampling):
        return "fixed"

    def propose(self, params, tables, target, cache, state, context, keys):
        place = context.length[:, None] + jnp.asarray(self.spec.node_depths) - 1
        at = context.tokens[:, :1], jnp.minimum(place, tables["texts"].shape[1] - 1)
        right = jnp.isin(jnp.arange(self.num_nodes), jnp.asarray(self.right)) & tables["right"][at]
        wrong = tables["texts"][at] + 1 + jnp.asarray(self.spec.child_ranks)
        return self.spec.draft(jnp.where(right, tables["texts"][at], wrong % common.VOCAB)), state, cache


REQUESTS = [Request((row, *range(4 + row)), 30, id=row) for row in range(ROWS)]


@cache
def plain() -> list[Completion]:
    sub = dataclasses.replace(common.subject(Autoregressive()), eos=())
    return contract.complete(*sub.autoregressive(), REQUESTS)


def scripted(spec: TreeSpec, right: tuple[int, ...], alphas: tuple[float, ...]) -> Subject:
    texts = np.zeros((ROWS, contract.BUFFER), np.int32)
    for row, (request, done) in enumerate(zip(REQUESTS, plain(), strict=True)):
        text = (*request.prompt, *done.tokens)
        texts[row, : len(text)] = text
    chance = np.random.default_rng(0).random(texts.shape)
    tables = {"texts": jnp.asarray(texts), "right": jnp.asarray(chance < np.asarray(alphas)[:, None])}
    return dataclasses.replace(common.subject(Scripted(spec, right), tables=tables), eos=())
