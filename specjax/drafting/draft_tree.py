"""A smaller language model drafts a tree of candidates: SpecInfer (Miao et al. 2024), Sequoia (Chen et al. 2024)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import Context, Draft, Keys, Kind, Sampling
from specjax.decoding.sampling import DRAFT, log_law
from specjax.decoding.tree import TreeSpec
from specjax.drafting.draft_model import DraftModelState, DraftNetwork
from specjax.drafting.heads import likeliest
from specjax.models import Decoder, KVCache, ModelConfig, Tap, View, causal_view


@dataclasses.dataclass(frozen=True)
class DraftTree(DraftNetwork):
    """A static tree from a decoder of its own, one pass a level.

    At temperature 0 a node takes its parent's candidate of its rank. Above it the children of a node are drawn from
    the one law behind it: independently of each other (SpecInfer; `k_seq` is exact for these too), or without
    replacement (Sequoia), so that no candidate is verified twice. The first pass of a step feeds as many committed
    tokens as a step can have accepted: the path lies scattered over the scratch slots of the tree that it came from.

    Attributes:
        config: the draft network, see `DraftModel`.
        tree: the nodes.
        siblings: how the children of a node are drawn.
        temperature: times the request's own gives the draft's, see `DraftModel`.
        shares: parameter groups taken from the target by reference (`embed`).
    """

    config: ModelConfig
    tree: TreeSpec
    siblings: Literal["iid", "without_replacement"] = "without_replacement"
    temperature: float = 1.0
    shares: tuple[str, ...] = ()
    taps: tuple[Tap, ...] = ()
    num_probes: int = 0

    def __post_init__(self) -> None:
        if not self.tree.num_nodes:
            raise ValueError("a tree without nodes; a draft model drafts at least 1 token")
        if self.siblings not in ("iid", "without_replacement"):
            raise ValueError(f"siblings={self.siblings!r}; expected 'iid' or 'without_replacement'")
        if self.siblings == "without_replacement":
            _check_all_drawn(self.tree)
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} of a draft model; expected a factor above 0")
        if self.tree.max_children > self.config.head_size:
            raise ValueError(
                f"a node has {self.tree.max_children} children, the draft vocabulary only {self.config.head_size} "
                "tokens; expected fewer children"
            )

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.tree.num_nodes

    @property
    def depth(self) -> int:
        """D."""
        return self.tree.depth

    @property
    def draft_passes(self) -> int:
        """One a level."""
        return self.tree.depth

    def kind(self, sampling: Sampling) -> Kind:
        """Greedy drafts are choices; sampled ones as `siblings` says."""
        return "fixed" if sampling.greedy else self.siblings

    def propose(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        cache: KVCache,
        state: DraftModelState,
        context: Context,
        keys: Keys,
    ) -> tuple[Draft, DraftModelState, KVCache]:
        """A pass over the last committed tokens, then one over each level's nodes that have children."""
        network, vocab = self.network(params, target), tables.get("vocab")
        parents, ranks = np.asarray(self.tree.parents), np.asarray(self.tree.child_ranks)
        batch, window = context.tokens.shape[0], self.depth + 1

        def run(own: KVCache, tokens_bt: jax.Array, view: View) -> tuple[jax.Array, KVCache]:
            out, own = network.cached(tokens_bt, own, view, taps=("normed",))
            return out.taps["normed"], own

        # A text shorter than the window begins within it; what follows the root there is overwritten before it is read.
        start = jnp.maximum(context.length - window, 0)
        fed = jnp.take_along_axis(context.tokens, start[:, None] + jnp.arange(window), axis=1)
        normed, own = run(state.cache, fed, causal_view(start, window))
        normed = jnp.take_along_axis(normed, (context.length - 1 - start)[:, None, None], axis=1)

        expanded = np.asarray([-1])  # nodes that `normed` is of
        ran: list[int] = []  # nodes in the draft's scratch slots, in order
        picks = jnp.zeros((batch, self.num_nodes), jnp.int32)
        valid = jnp.ones((batch, self.num_nodes), bool)
        laws: list[jax.Array] = []
        law = np.zeros(self.num_nodes, np.int32)
        for members in map(np.asarray, self.tree.levels):
            seen = self.tree.on_paths(expanded, ran)
            on_path = jnp.broadcast_to(seen, (batch, *seen.shape))
            logits = context.process(network.logits(normed), picks[:, np.asarray(ran, np.int32)], on_path, vocab)
            owner, count = np.searchsorted(expanded, parents[members]), int(ranks[members].max()) + 1
            if context.sampling.greedy:
                ids = likeliest(logits, count)
            else:
                level = log_law(logits / self.temperature, context.sampling)
                law[members] = owner + sum(x.shape[1] for x in laws)
                laws.append(level)
                ids = self._draw(keys, expanded, level, count)
                drawn = jnp.take_along_axis(level, ids, axis=-1)[:, owner, ranks[members]]
                # Siblings without replacement may outnumber the tokens of a warped law.
                valid = valid.at[:, members].set(jnp.isfinite(drawn))
            picks = picks.at[:, members].set(ids[:, owner, ranks[members]])
            inner = members[np.isin(members, parents)]
            if not len(inner):
                break
            ran += inner.tolist()
            seen = self.tree.on_paths(inner, ran)
            depths = np.asarray(self.tree.node_depths, np.int32)[ran] - 1
            view = View(
                context.length,
                jnp.broadcast_to(seen, (batch, *seen.shape)),
                jnp.broadcast_to(depths, (batch, len(ran))),
            )
            normed, own = run(own, picks[:, inner] if vocab is None else vocab[picks[:, inner]], view)
            expanded = inner
        draft = self.tree.draft(
            picks if vocab is None else vocab[picks],
            law=jnp.broadcast_to(law, (batch, self.num_nodes)) if laws else None,
            laws=jnp.concatenate(laws, axis=1) if laws else None,
            vocab=vocab,
            siblings=self.siblings,
        )
        return dataclasses.replace(draft, valid=valid), DraftModelState(own), cache

    def _draw(self, keys: Keys, expanded: np.ndarray, laws_bmv: jax.Array, count: int) -> jax.Array:
        """`[B, M, count]` draft ids: candidates behind each node, in the order in which they were drawn."""

        def behind(node: jax.Array, law_bv: jax.Array) -> jax.Array:
            first_slot = (node + 1) * self.tree.max_children
            if self.siblings == "without_replacement":
                return keys.sample_distinct(DRAFT, first_slot, law_bv, count)
            slots = first_slot + jnp.arange(count)
            return jax.vmap(lambda slot: keys.sample(DRAFT, slot, law_bv), out_axes=1)(slots)

        return jax.vmap(behind, in_axes=(0, 1), out_axes=1)(jnp.asarray(expanded), laws_bmv)


__all__ = ["DraftTree"]


def _check_all_drawn(tree: TreeSpec) -> None:
    """Each draw without replacement is conditioned on those before it, so these are nodes, in the order of drawing.

    Raises:
        ValueError: siblings of other ranks than 0, 1, ... in the order of their nodes.
    """
    for parent in (-1, *range(tree.num_nodes)):
        ranks = [rank for up, rank in zip(tree.parents, tree.child_ranks, strict=True) if up == parent]
        if ranks != list(range(len(ranks))):
            where = "the root" if parent < 0 else f"node {parent}"
            raise ValueError(
                f"the children of {where} are of ranks {', '.join(map(str, ranks))}; siblings drawn without "
                "replacement are all the draws from rank 0 on, in order: name the ranks before them too, or "
                "siblings='iid'"
            )
