"""A drafter whose laws are a table: any static tree, drawn in any of the ways that rules tell apart."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Stateless
from specjax.decoding.sampling import DRAFT, log_law
from specjax.decoding.tree import TreeSpec
from specjax.models import Decoder, KVCache, Tap


@dataclasses.dataclass(frozen=True)
class TableTree(Stateless):
    """Draws a static tree; the law behind a token depends on that token alone.

    `params["logits"]` `[V, Vd]` holds the logits of the next draft id behind each target id, `tables["vocab"]` `[Vd]`
    the target id of each draft id (absent where they agree).

    Attributes:
        spec: the tree.
        siblings: how the children of one node are drawn.
    """

    spec: TreeSpec
    siblings: Literal["iid", "without_replacement"] = "iid"
    taps: tuple[Tap, ...] = ()
    num_probes: int = 0

    @property
    def num_nodes(self) -> int:
        """Nodes of the tree."""
        return self.spec.num_nodes

    @property
    def depth(self) -> int:
        """Its longest path."""
        return self.spec.depth

    def kind(self, sampling: Sampling) -> Kind:
        """The likeliest tokens are choices; above temperature 0 they are drawn."""
        return "fixed" if sampling.greedy else self.siblings

    def init_params(self, key: jax.Array, target: Decoder) -> tuple[Any, Any]:
        """A random table."""
        vocab = target.config.vocab_size
        return {"logits": 1.5 * jax.random.normal(key, (vocab, vocab))}, {}

    def propose(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        cache: KVCache,
        state: Any,
        context: Context,
        keys: Keys,
    ) -> tuple[Draft, Any, KVCache]:
        """Node by node, each with its own key."""
        vocab = tables.get("vocab")
        laws: dict[int, jax.Array] = {}  # of the children of each parent
        tokens: list[jax.Array] = []
        drawn: dict[int, list[jax.Array]] = {}  # draft ids of the children so far
        for node, parent in enumerate(self.spec.parents):
            last = context.last(1)[:, 0] if parent < 0 else tokens[parent]
            if parent not in laws:
                laws[parent] = self.law(params, last, context.sampling)
            earlier = drawn.setdefault(parent, [])
            if context.sampling.greedy:
                _, ranked = jax.lax.top_k(params["logits"][last], self.spec.max_children)
                pick = ranked[:, self.spec.child_ranks[node]]
            else:
                pick = self.draw(keys, node, self._left(laws[parent], earlier))
            earlier.append(pick)
            tokens.append(pick if vocab is None else vocab[pick])
        greedy = context.sampling.greedy
        batch = context.length.shape[0]
        place = {parent: index for index, parent in enumerate(laws)}
        law = jnp.asarray([place[parent] for parent in self.spec.parents], jnp.int32)
        draft = self.spec.draft(
            jnp.stack(tokens, axis=1),
            law=None if greedy else jnp.broadcast_to(law, (batch, law.size)),
            laws=None if greedy else jnp.stack(list(laws.values()), axis=1),
            vocab=vocab,
            siblings=self.siblings,
        )
        return draft, state, cache

    def law(self, params: Any, last_b: jax.Array, sampling: Sampling) -> jax.Array:
        """`[B, Vd]` log-probabilities behind the tokens `last`."""
        return log_law(params["logits"][last_b], sampling)

    def draw(self, keys: Keys, node: int, law_bv: jax.Array) -> jax.Array:
        """One draft id a row `[B]`."""
        return keys.sample(DRAFT, node, law_bv)

    def _left(self, law_bv: jax.Array, earlier: list[jax.Array]) -> jax.Array:
        if self.siblings == "without_replacement":
            for pick in earlier:
                law_bv = jnp.where(jnp.arange(law_bv.shape[-1]) == pick[:, None], -jnp.inf, law_bv)
        return law_bv


def table_params(vocab: int, seed: int, sharpness: float = 2.5) -> dict[str, jax.Array]:
    """A random table of a `TableTree` over the whole vocabulary."""
    logits = sharpness * np.random.default_rng(seed).normal(size=(vocab, vocab))
    return {"logits": jnp.asarray(logits, jnp.float32)}
