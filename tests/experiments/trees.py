"""A drafter with a static tree for tests of programs: after a token come those that the target likes best after it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.decoding import Stateless
from specjax.decoding.tree import TreeSpec, from_choices
from specjax.drafting.registry import Drafting
from specjax.models import Target, causal_view, init_cache, merge

# Two children of the root, two below each of them.
CHOICES = ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))


@dataclasses.dataclass(frozen=True)
class Successors(Stateless):
    tree: TreeSpec
    num_probes: int = 0
    taps: tuple = ()

    @property
    def num_nodes(self):
        return self.tree.num_nodes

    @property
    def depth(self):
        return self.tree.depth

    def kind(self, sampling):
        return "fixed"

    def init_params(self, key, target):
        raise NotImplementedError("made from a target by `make`")

    def propose(self, params, tables, target, cache, state, context, keys):
        tokens = []
        for parent, rank in zip(self.tree.parents, self.tree.child_ranks, strict=True):
            before = context.last(1)[:, 0] if parent < 0 else tokens[parent]
            tokens.append(tables["successors"][before, rank])
        return self.tree.draft(jnp.stack(tokens, axis=1)), state, cache


def make(target: Target, choices=CHOICES, tree: str = "choices") -> Drafting:
    assert tree == "choices"
    decoder, vocab = merge(target.graph, target.params), target.config.vocab_size
    view = causal_view(jnp.zeros((vocab,), jnp.int32), 1)
    out, _ = decoder.cached(jnp.arange(vocab)[:, None], init_cache(target.config, vocab, 1), view, taps=("normed",))
    _, best = jax.lax.top_k(decoder.logits(out.taps["normed"])[:, 0], 4)
    return Drafting("successors", Successors(from_choices(choices)), {}, {"successors": best.astype(jnp.int32)})
