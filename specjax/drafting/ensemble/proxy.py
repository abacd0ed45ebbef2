"""Of the members' runs the one that a proxy of the target likes best is verified."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Scores, Verdict, log_law
from specjax.decoding.sampling import DRAFT
from specjax.decoding.tree import chain, draft_view
from specjax.drafting.ensemble.members import Members, fold, per_member
from specjax.drafting.ensemble.union import join
from specjax.drafting.ensemble.vote import proposed
from specjax.models import Decoder, KVCache, Tap, causal_view

# What chooses: the target's own layers below `layer`, or all of them, what each member was worth so far, or chance.
Proxy = Literal["early_exit", "oracle", "calibration", "random"]
PROXIES = ("early_exit", "oracle", "calibration", "random")
READERS = ("early_exit", "oracle")  # which run layers of the target


@flax.struct.dataclass
class ProxyState:
    """The members' states, what each would have said last, and what they were worth.

    Attributes:
        members: their states.
        first: `[B, J]` int32 first token of each member's last run, -1 where nothing was proposed.
        chance: `[B, J]` float32 probability with which its member drew it; 1 for a fixed choice.
        worth: `[B, J]` float32, running mean of the chance that the target accepts a member's first token.
    """

    members: Any
    first: jax.Array
    chance: jax.Array
    worth: jax.Array


@dataclasses.dataclass(frozen=True)
class EnsembleProxy:
    """Every member drafts a chain; per row and step one of them is chosen, before the target has seen any.

    `early_exit` runs the target's first `layer` layers, its last norm and its head. Where drafts are drawn, it takes
    the member whose first law overlaps most with the proxy's, sum_x min(p(x), q(x)): laws do not depend on what was
    drawn from them, so the chosen nodes keep theirs. Greedy drafts draw nothing: there it runs over every run's tokens,
    and takes the run with the highest expected accepted length (a row at temperature 0 beside warmer ones is chosen for
    by first tokens, too). `oracle` is the same with all of the target's layers,
    for analysis: it costs a whole target pass. `calibration` takes the member whose first tokens the target would have
    accepted most often in this request, chosen or not; `random` takes any.

    Ties, and rows at temperature 0 where no run's first token is the proxy's own, are settled by the proxy's
    probabilities at temperature 1, then by the calibration. A member that proposes nothing is not chosen.

    Attributes:
        members: drafters of chains; each drafts `num_nodes` tokens.
        num_nodes: tokens of a run.
        proxy: who chooses.
        layer: of `early_exit`; 0 reads the embeddings only.
        step_size: of the calibration's running mean.
    """

    members: Members
    num_nodes: int = 4
    proxy: Proxy = "early_exit"
    layer: int = 1
    step_size: float = 0.1

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.layer < 0 or not 0 < self.step_size <= 1:
            raise ValueError(
                f"num_nodes={self.num_nodes}, layer={self.layer}, step_size={self.step_size}; expected at least 1, at "
                "least 0, and a number in (0, 1]"
            )
        if self.proxy not in PROXIES:
            raise ValueError(f"proxy={self.proxy!r}; expected {', '.join(PROXIES)}")
        self._sized.check_depth(self.num_nodes)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """What any member reads."""
        return self.members.taps

    @property
    def depth(self) -> int:
        """The chain's length."""
        return self.num_nodes

    @property
    def num_probes(self) -> int:
        """None are sent; the cache slots are reserved: `early_exit` runs over all runs, one is verified."""
        return (self.members.count - 1) * self.num_nodes if self.proxy in READERS else 0

    @property
    def draft_passes(self) -> int:
        """All members', and the proxy's own where it is layers of the target."""
        return self._sized.draft_passes + (self.proxy in READERS)

    def kind(self, sampling: Sampling) -> Kind:
        """As the members draft."""
        kinds = self.members.kinds(sampling)
        return kinds.pop() if len(kinds) == 1 else "mixed"

    def init_params(self, key: jax.Array, target: Decoder) -> tuple[Any, Any]:
        """The members', and no knowledge of which is better."""
        params, tables = self.members.init_params(key, target)
        return params, self.tables(tables)

    def tables(self, members: tuple[Any, ...], worth: Sequence[float] | None = None) -> Any:
        """The ensemble's tables around those of its members; `worth` is one number a member, equal by default."""
        return {"members": members, "worth": per_member("worth", worth, self.members.count, 0.5, most=1.0)}

    def init_state(self, params: Any, tables: Any, target: Decoder, batch: int, capacity: int) -> ProxyState:
        """The tables' calibration in every row."""
        count = self.members.count
        return ProxyState(
            members=self._sized.init_state(params, tables["members"], target, batch, capacity),
            first=jnp.full((batch, count), -1, jnp.int32),
            chance=jnp.ones((batch, count), jnp.float32),
            worth=jnp.broadcast_to(tables["worth"].astype(jnp.float32), (batch, count)),
        )

    def extend(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: ProxyState,
        tokens: jax.Array,
        positions: jax.Array,
        taps: dict[Tap, jax.Array],
        valid: jax.Array,
    ) -> ProxyState:
        """Every member takes the tokens in."""
        parts = (params, tables["members"], target, state.members)
        return dataclasses.replace(state, members=self._sized.extend(*parts, tokens, positions, taps, valid))

    def propose(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        cache: KVCache,
        state: ProxyState,
        context: Context,
        keys: Keys,
    ) -> tuple[Draft, ProxyState, KVCache]:
        """All runs, then the choice."""
        drafts, own, cache = self._sized.propose(params, tables["members"], target, cache, state.members, context, keys)
        if self.proxy in READERS:
            score_bj, cache = self._ask(target, cache, drafts, context, state.worth)
        elif self.proxy == "calibration":
            score_bj = state.worth
        else:
            chance = fold(keys, self.members.count)
            score_bj = jnp.stack([chance.uniform(DRAFT, j) for j in range(self.members.count)], axis=1)
        first_bj = jnp.stack([proposed(draft)[:, 0] for draft in drafts], axis=1)
        chosen_b = jnp.argmax(jnp.where(first_bj >= 0, score_bj, -1.0), axis=1)
        drawn_bj = jnp.stack([first_chance(draft) for draft in drafts], axis=1)
        state = dataclasses.replace(state, members=own, first=first_bj, chance=drawn_bj)
        return pick(drafts, chosen_b), state, cache

    def commit(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: ProxyState,
        context: Context,
        draft: Draft,
        scores: Scores,
        verdict: Verdict,
    ) -> ProxyState:
        """Holds every member's first token, chosen or not, against the target's law there."""
        parts = (params, tables["members"], target, state.members)
        members = self._sized.commit(*parts, context, draft, scores, verdict)
        if context.sampling.greedy:
            accepted_bj = (state.first == scores.argmax[:, :1]).astype(jnp.float32)
        else:
            p_bv = jnp.exp(log_law(scores.logits[:, 0], context.sampling))
            p_bj = jnp.take_along_axis(p_bv, jnp.maximum(state.first, 0), axis=1)
            accepted_bj = jnp.minimum(1.0, p_bj / jnp.maximum(state.chance, jnp.finfo(jnp.float32).tiny))
        moved_bj = state.worth + self.step_size * (accepted_bj - state.worth)
        return dataclasses.replace(state, members=members, worth=jnp.where(state.first >= 0, moved_bj, state.worth))

    @property
    def _sized(self) -> Members:
        return self.members.resized(self.num_nodes).reading(self.num_nodes + 1)

    def _ask(
        self, target: Decoder, cache: KVCache, drafts: list[Draft], context: Context, worth_bj: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        """`[B, J]`: how well the proxy likes each member's draft, from one pass of its layers."""
        if self.proxy == "early_exit" and self.layer > target.config.num_layers:
            raise ValueError(
                f"layer={self.layer} of the proxy, but the target has {target.config.num_layers}; expected at most "
                "that, or proxy 'oracle' for all of them"
            )
        stop = None if self.proxy == "oracle" else self.layer
        judge = run_lengths if context.sampling.greedy else root_overlaps
        worth, cache = judge(target, stop, cache, drafts, context)
        cold_b = context.sampling.temperature <= 0
        warm = jnp.where(cold_b, 1.0, context.sampling.temperature)
        most = self.num_nodes + 1  # above what any run is worth
        soft_bj = (
            worth(dataclasses.replace(context.sampling, temperature=warm, greedy=False)) + 1e-3 * worth_bj
        ) / most
        return jnp.where(cold_b[:, None], worth(context.sampling) + soft_bj, soft_bj), cache


# What each member's draft is worth `[B, J]` to a proxy that samples in a certain way.
Worth = Callable[[Sampling], jax.Array]


def run_lengths(
    target: Decoder, stop: int | None, cache: KVCache, drafts: list[Draft], context: Context
) -> tuple[Worth, KVCache]:
    """Expected accepted length of fixed runs, sum over d of the product of the proxy's probabilities up to d.

    Args:
        target: whose layers below `stop` are the proxy, None for all.
        stop: see `target`.
        cache: of the target.
        drafts: fixed chains of one length; they lie side by side in one pass.
        context: what is committed.
    """
    count, depth = len(drafts), drafts[0].num_nodes
    runs = join(drafts)
    view = draft_view(runs, context.length - 1)
    inputs = jnp.concatenate([context.last(1), runs.tokens], axis=1)
    out, cache = target.cached(inputs, cache, view, stop=stop)
    before = np.arange(count * depth).reshape(count, depth)  # index in the pass of what each token follows
    before[:, 0] = 0
    followed = before.reshape(-1)
    logits = target.logits(target.final_norm(out.hidden[:, followed]))
    logits = context.process(logits, runs.tokens, view.mask[:, followed, 1:])

    def worth(sampling: Sampling) -> jax.Array:
        p_bnv = jnp.exp(log_law(logits, sampling))
        p_bn = jnp.take_along_axis(p_bnv, runs.tokens[..., None], axis=-1)[..., 0]
        p_bjd = jnp.where(runs.valid, p_bn, 0.0).reshape(-1, count, depth)
        return jnp.cumprod(p_bjd, axis=-1).sum(-1)

    return worth, cache


def root_overlaps(
    target: Decoder, stop: int | None, cache: KVCache, drafts: list[Draft], context: Context
) -> tuple[Worth, KVCache]:
    """Overlap of each member's first law with the proxy's behind the root; see `run_lengths` for the arguments.

    Of a fixed first token it is the token's probability. Neither depends on anything that was drawn.
    """
    out, cache = target.cached(context.last(1), cache, causal_view(context.length - 1, 1), stop=stop)
    logits = context.process(target.logits(target.final_norm(out.hidden)))[:, 0]

    def worth(sampling: Sampling) -> jax.Array:
        p_bv = jnp.exp(log_law(logits, sampling))
        found = []
        for draft in drafts:
            overlap_b = jnp.take_along_axis(p_bv, draft.tokens[:, :1], axis=1)[:, 0]
            if draft.laws.shape[1]:
                drawn_b = jnp.minimum(p_bv, jnp.exp(first_law(draft))).sum(-1)
                overlap_b = jnp.where(draft.law[:, 0] >= 0, drawn_b, overlap_b)
            found.append(jnp.where(draft.valid[:, 0], overlap_b, 0.0))
        return jnp.stack(found, axis=1)

    return worth, cache


def first_law(draft: Draft) -> jax.Array:
    """`[B, V]`: the law that the first node was drawn from; of no meaning where it was chosen."""
    return jnp.take_along_axis(draft.laws, jnp.maximum(draft.law[:, 0], 0)[:, None, None], axis=1)[:, 0]


def first_chance(draft: Draft) -> jax.Array:
    """`[B]`: the probability with which the first node was drawn, 1 where it was chosen."""
    if not draft.laws.shape[1]:
        return jnp.ones(draft.tokens.shape[:1], jnp.float32)
    log_q = jnp.take_along_axis(first_law(draft), draft.tokens[:, :1], axis=1)[:, 0]
    return jnp.where(draft.law[:, 0] >= 0, jnp.exp(log_q), 1.0)


def pick(drafts: list[Draft], chosen_b: jax.Array) -> Draft:
    """Each row's chain from the member chosen there.

    Args:
        drafts: chains of one length, laws over one vocabulary.
        chosen_b: int32 index into `drafts`.
    """

    def take(x_jb: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x_jb, chosen_b.reshape(1, -1, *(1,) * (x_jb.ndim - 2)), axis=0)[0]

    draft = chain(take(jnp.stack([d.tokens for d in drafts])), laws=None)
    draft = dataclasses.replace(draft, valid=take(jnp.stack([d.valid for d in drafts])))
    laws = _laws_by_node(drafts)
    if laws is None:
        return draft
    law = take(jnp.stack([jnp.where(d.law >= 0, jnp.arange(draft.num_nodes), -1) for d in drafts]))
    return dataclasses.replace(draft, law=law, laws=take(laws))


def _laws_by_node(drafts: list[Draft]) -> jax.Array | None:
    """`[J, B, D, V]`: the law of every member's every node, placeholders where one was chosen; None if all were."""
    drawn = [d for d in drafts if d.laws.shape[1]]
    if not drawn:
        return None
    batch, depth = drafts[0].tokens.shape
    none = jnp.zeros((batch, depth, drawn[0].laws.shape[-1]), drawn[0].laws.dtype)

    def rows(d: Draft) -> jax.Array:
        return jnp.take_along_axis(d.laws, jnp.maximum(d.law, 0)[..., None], axis=1) if d.laws.shape[1] else none

    return jnp.stack([rows(d) for d in drafts])
