"""Of the members' runs the one that a proxy of the target likes best is verified."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Scores, Verdict, log_law
from specjax.decoding.loop import emitted_block
from specjax.decoding.sampling import DRAFT
from specjax.decoding.tree import chain, draft_view
from specjax.drafting.ensemble.members import Members, fold, per_member
from specjax.drafting.ensemble.union import join
from specjax.drafting.ensemble.vote import proposed
from specjax.models import Decoder, KVCache, Tap

# What chooses: the target's own layers below `layer`, or all of them, what each member's runs were worth so far, or
# chance.
Proxy = Literal["early_exit", "oracle", "calibration", "random"]
PROXIES = ("early_exit", "oracle", "calibration", "random")
READERS = ("early_exit", "oracle")  # of the drafted tokens


@flax.struct.dataclass
class ProxyState:
    """The members' states, their last runs, and what earlier ones were worth.

    Attributes:
        members: their states.
        runs: `[B, J, D]` int32 tokens, -1 where nothing was proposed.
        worth: `[B, J]` float32, running mean of the share of a run that the target confirmed.
    """

    members: Any
    runs: jax.Array
    worth: jax.Array


@dataclasses.dataclass(frozen=True)
class EnsembleProxy:
    """Every member drafts a chain; per row and step one of them is chosen, before the target has seen any.

    `early_exit` reads the drafted tokens: it runs the target's first `layer` layers, its last norm and its head over
    all runs, and takes the one whose tokens have the highest expected accepted length there. A choice by drawn tokens
    changes their law, so these drafts are fixed. `oracle` is the same with all of the target's layers, for analysis: it
    costs a whole target pass. `calibration` takes the member whose runs were confirmed best in this request, `random`
    any; neither looks at drawn tokens, so the chosen nodes keep their laws.

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
        return (self.members.count - 1) * self.num_nodes if self.reads_tokens else 0

    @property
    def reads_tokens(self) -> bool:
        """Whether the choice depends on tokens that were drawn."""
        return self.proxy in READERS

    @property
    def draft_passes(self) -> int:
        """All members', and the proxy's own where it is layers of the target."""
        return self._sized.draft_passes + self.reads_tokens

    def kind(self, sampling: Sampling) -> Kind:
        """Fixed when chosen by its tokens; else as the members draft."""
        kinds = self.members.kinds(sampling)
        if self.reads_tokens or kinds == {"fixed"}:
            return "fixed"
        return "iid" if kinds == {"iid"} else "mixed"

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
            runs=jnp.full((batch, count, self.num_nodes), -1, jnp.int32),
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
        runs_bjd = jnp.stack([proposed(draft) for draft in drafts], axis=1)
        if self.proxy in READERS:
            score_bj, cache = self._early_exit(target, cache, drafts, context, state.worth)
        elif self.proxy == "calibration":
            score_bj = state.worth
        else:
            chance = fold(keys, self.members.count)
            score_bj = jnp.stack([chance.uniform(DRAFT, j) for j in range(self.members.count)], axis=1)
        chosen_b = jnp.argmax(jnp.where(runs_bjd[..., 0] >= 0, score_bj, -1.0), axis=1)
        draft = pick(drafts, chosen_b)
        if self.reads_tokens:
            draft = dataclasses.replace(draft, law=jnp.full_like(draft.law, -1), laws=draft.laws[:, :0])
        return draft, dataclasses.replace(state, members=own, runs=runs_bjd), cache

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
        """Holds every member's run, chosen or not, against what the target emitted."""
        parts = (params, tables["members"], target, state.members)
        members = self._sized.commit(*parts, context, draft, scores, verdict)
        block_b1d = emitted_block(draft, verdict)[:, None, : self.num_nodes]
        known_b1d = (jnp.arange(self.num_nodes) <= verdict.num_accepted[:, None])[:, None]
        share_bj = jnp.cumprod((state.runs == block_b1d) & known_b1d, axis=-1).mean(-1)
        moved_bj = state.worth + self.step_size * (share_bj - state.worth)
        worth = jnp.where(state.runs[..., 0] >= 0, moved_bj, state.worth)
        return dataclasses.replace(state, members=members, worth=worth)

    @property
    def _sized(self) -> Members:
        return self.members.resized(self.num_nodes).reading(self.num_nodes + 1)

    def _early_exit(
        self, target: Decoder, cache: KVCache, drafts: list[Draft], context: Context, worth_bj: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        """`[B, J]`: how well the proxy likes each run, from one pass over all of them side by side."""
        if self.proxy == "early_exit" and self.layer > target.config.num_layers:
            raise ValueError(
                f"layer={self.layer} of the proxy, but the target has {target.config.num_layers}; expected at most "
                "that, or proxy 'oracle' for all of them"
            )
        count, depth = len(drafts), self.num_nodes
        runs = join([dataclasses.replace(draft, laws=draft.laws[:, :0]) for draft in drafts])
        view = draft_view(runs, context.length - 1)
        inputs = jnp.concatenate([context.last(1), runs.tokens], axis=1)
        out, cache = target.cached(inputs, cache, view, stop=None if self.proxy == "oracle" else self.layer)
        before = np.arange(count * depth).reshape(count, depth)  # index in the pass of what each token follows
        before[:, 0] = 0
        followed = before.reshape(-1)
        logits = target.logits(target.final_norm(out.hidden[:, followed]))
        logits = context.process(logits, runs.tokens, view.mask[:, followed, 1:])
        tokens_bjd = runs.tokens.reshape(-1, count, depth)
        valid_bjd = runs.valid.reshape(tokens_bjd.shape)

        def length(sampling: Sampling) -> jax.Array:
            """`[B, J]`: sum over d of the product of the proxy's probabilities of the tokens up to d."""
            p_bnv = jnp.exp(log_law(logits, sampling))
            p_bn = jnp.take_along_axis(p_bnv, runs.tokens[..., None], axis=-1)[..., 0]
            p_bjd = jnp.where(valid_bjd, p_bn.reshape(tokens_bjd.shape), 0.0)
            return jnp.cumprod(p_bjd, axis=-1).sum(-1)

        cold_b = context.sampling.temperature <= 0
        warm = jnp.where(cold_b, 1.0, context.sampling.temperature)
        soft_bj = length(dataclasses.replace(context.sampling, temperature=warm, greedy=False))
        soft_bj = (soft_bj + 1e-3 * worth_bj) / (depth + 1)  # below one token
        hard_bj = length(context.sampling)
        return jnp.where(cold_b[:, None], hard_bj + soft_bj, soft_bj), cache


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
