"""All members' drafts side by side in one tree: SpecInfer's merged token trees (Miao et al. 2024), exact."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Scores, Verdict
from specjax.drafting.ensemble.members import Members
from specjax.models import Decoder, KVCache, Tap


@dataclasses.dataclass(frozen=True)
class EnsembleUnion:
    """Each member's draft is a branch under the root, each node with the law that its own member drew it from.

    The recursive rule tries the candidates member by member: accept c_j with probability min(1, r_j(c_j) / q_j(c_j)),
    else r_{j+1} is the normalised positive part of r_j - q_j. Where members begin with the same tokens their
    continuations become siblings (`merge_prefixes`).

    Attributes:
        members: drafters of chains or trees, in the order in which their candidates are tried.
    """

    members: Members
    num_probes: int = 0
    topology: Literal["dynamic_tree"] = "dynamic_tree"  # merging depends on the tokens

    def __post_init__(self) -> None:
        self.members.check_depth(self.depth)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """What any member reads."""
        return self.members.taps

    @property
    def num_nodes(self) -> int:
        """All members' nodes."""
        return sum(drafter.num_nodes for drafter in self.members.drafters)

    @property
    def depth(self) -> int:
        """That of the deepest member."""
        return max(drafter.depth for drafter in self.members.drafters)

    @property
    def draft_passes(self) -> int:
        """All members'."""
        return self.members.draft_passes

    def kind(self, sampling: Sampling) -> Kind:
        """Siblings come from different laws, unless none was drawn at all."""
        return "fixed" if self.members.kinds(sampling) == {"fixed"} else "mixed"

    def init_params(self, key: jax.Array, target: Decoder) -> tuple[Any, Any]:
        """Tuples of the members'."""
        params, tables = self.members.init_params(key, target)
        return params, self.tables(tables)

    def tables(self, members: tuple[Any, ...]) -> Any:
        """The ensemble's tables around those of its members, nothing calibrated yet."""
        return {"members": members}

    def init_state(self, params: Any, tables: Any, target: Decoder, batch: int, capacity: int) -> Any:
        """The members' states."""
        return self.members.init_state(params, tables["members"], target, batch, capacity)

    def extend(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: Any,
        tokens: jax.Array,
        positions: jax.Array,
        taps: dict[Tap, jax.Array],
        valid: jax.Array,
    ) -> Any:
        """Every member takes the tokens in."""
        return self.members.extend(params, tables["members"], target, state, tokens, positions, taps, valid)

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
        """All drafts, joined."""
        members = self.members.reading(self.depth + 1)
        drafts, state, cache = members.propose(params, tables["members"], target, cache, state, context, keys)
        return merge_prefixes(join(drafts)), state, cache

    def commit(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: Any,
        context: Context,
        draft: Draft,
        scores: Scores,
        verdict: Verdict,
    ) -> Any:
        """Every member takes the verdict in."""
        return self.members.commit(params, tables["members"], target, state, context, draft, scores, verdict)


def join(drafts: list[Draft]) -> Draft:
    """One tree that holds every draft under the root, laws over the target's vocabulary.

    Raises:
        ValueError: trees whose siblings are drawn in different ways; a draft says so once for all its nodes.
    """
    ways = {draft.siblings for draft in drafts if draft.laws.shape[1] and not draft.is_chain}
    if len(ways) > 1:
        raise ValueError(f"member trees have siblings drawn {' and '.join(sorted(ways))}; expected one way for all")
    parents, law, nodes, rows = [], [], 0, 0
    for draft in drafts:
        parents.append(jnp.where(draft.parents >= 0, draft.parents + nodes, -1))
        law.append(jnp.where(draft.law >= 0, draft.law + rows, -1))
        nodes, rows = nodes + draft.num_nodes, rows + draft.laws.shape[1]
    drawn = [draft.laws for draft in drafts if draft.laws.shape[1]]
    return Draft(
        tokens=jnp.concatenate([draft.tokens for draft in drafts], axis=1),
        parents=jnp.concatenate(parents, axis=1),
        valid=jnp.concatenate([draft.valid for draft in drafts], axis=1),
        law=jnp.concatenate(law, axis=1),
        laws=jnp.concatenate(drawn, axis=1) if drawn else drafts[0].laws,
        siblings=ways.pop() if ways else "iid",
    )


def merge_prefixes(draft: Draft) -> Draft:
    """Nodes that repeat an earlier sibling's token hand their children over to it.

    The repeated node stays, a leaf: it is still tried when the first one is rejected (and then rejected too), so the
    laws that a walk has seen are those that were drawn from. Which node a child hangs under depends on tokens above it
    only; hence this is exact.
    """
    rows, index = jnp.arange(draft.tokens.shape[0]), jnp.arange(draft.num_nodes)

    def body(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        parents, first = carry  # first[b, i]: the earliest node with the same path of tokens
        above = parents[:, i]
        above = jnp.where(above >= 0, first[rows, jnp.maximum(above, 0)], -1)
        parents = parents.at[:, i].set(above)
        same = (draft.tokens == draft.tokens[:, i, None]) & (parents == above[:, None]) & (index < i)
        same &= draft.valid & draft.valid[:, i, None]
        return parents, first.at[:, i].set(jnp.where(same.any(-1), jnp.argmax(same, -1), i).astype(jnp.int32))

    init = (draft.parents, jnp.broadcast_to(index.astype(jnp.int32), draft.tokens.shape))
    return dataclasses.replace(draft, parents=jax.lax.fori_loop(0, draft.num_nodes, body, init)[0])
