"""Members vote on each token, or on each run of tokens, and all continue from what was voted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Scores, Verdict
from specjax.decoding.loop import emitted_block
from specjax.decoding.tree import chain
from specjax.drafting.ensemble.members import Members, per_member
from specjax.models import Decoder, KVCache, Tap

CONFIDENCE = 8.0  # How many votes the calibration in the tables weighs as much as.


@flax.struct.dataclass
class VoteState:
    """The members' states, the ballots of the last step, and what became of earlier ones.

    Attributes:
        members: their states.
        ballots: `[B, D, J]` int32 token of each member at each depth, -1 where it abstained.
        agreeing: `[B, D]` int32 members behind the voted token.
        hits: `[B, J]` float32 ballots that the target confirmed.
        trials: `[B, J]` float32 ballots that it confirmed or refuted.
        outcomes: `[B, J, J, 2]` int32: of the tokens that `a` of `n` voters agreed on (indices a - 1, n - 1), those
            that were verified and those accepted. A finished row of a batch counts one step more.
        counted: `[B]` int32 length up to which steps were counted: a finished row stands still.
    """

    members: Any
    ballots: jax.Array
    agreeing: jax.Array
    hits: jax.Array
    trials: jax.Array
    outcomes: jax.Array
    counted: jax.Array


@dataclasses.dataclass(frozen=True)
class EnsembleVote:
    """The token on which the most members agree, in lockstep: every member continues from the voted tokens.

    Members vote with their likeliest tokens at every temperature: a vote is a choice, which the target accepts with
    the probability it gives it. Ties go to the members that were right more often (`tables["accuracy"]` `[J]`, and
    what this request has shown since), then to the first. Who proposes nothing does not vote; where nobody does the
    draft ends.

    Attributes:
        members: drafters of chains that read nothing of the target's pass.
        num_nodes: tokens to draft.
        run: tokens that are voted on at once; members agree when all of them are the same. Divides `num_nodes`.
    """

    members: Members
    num_nodes: int = 4
    run: int = 1
    num_probes: int = 0

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.run < 1 or self.num_nodes % self.run:
            raise ValueError(f"num_nodes={self.num_nodes}, run={self.run}; expected both at least 1, run a divisor")
        self.members.check_lockstep()
        self.members.resized(self.run)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """Members in lockstep read none."""
        return ()

    @property
    def depth(self) -> int:
        """The chain's length."""
        return self.num_nodes

    @property
    def draft_passes(self) -> int:
        """All members', one run at a time."""
        return self.num_nodes // self.run * self.members.resized(self.run).draft_passes

    def kind(self, sampling: Sampling) -> Kind:
        """Votes are choices."""
        del sampling
        return "fixed"

    def init_params(self, key: jax.Array, target: Decoder) -> tuple[Any, Any]:
        """The members', and no knowledge of who is right more often."""
        params, tables = self.members.init_params(key, target)
        return params, self.tables(tables)

    def tables(self, members: tuple[Any, ...], accuracy: Sequence[float] | None = None) -> Any:
        """The ensemble's tables around those of its members; `accuracy` is one number a member, equal by default."""
        return {"members": members, "accuracy": per_member("accuracy", accuracy, self.members.count, 0.5, most=1.0)}

    def init_state(self, params: Any, tables: Any, target: Decoder, batch: int, capacity: int) -> VoteState:
        """Nothing voted yet."""
        count, depth = self.members.count, self.num_nodes
        return VoteState(
            members=self.members.init_state(params, tables["members"], target, batch, capacity),
            ballots=jnp.full((batch, depth, count), -1, jnp.int32),
            agreeing=jnp.zeros((batch, depth), jnp.int32),
            hits=jnp.zeros((batch, count)),
            trials=jnp.zeros((batch, count)),
            outcomes=jnp.zeros((batch, count, count, 2), jnp.int32),
            counted=jnp.zeros((batch,), jnp.int32),
        )

    def extend(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: VoteState,
        tokens: jax.Array,
        positions: jax.Array,
        taps: dict[Tap, jax.Array],
        valid: jax.Array,
    ) -> VoteState:
        """Every member takes the tokens in."""
        parts = (params, tables["members"], target, state.members)
        return dataclasses.replace(state, members=self.members.extend(*parts, tokens, positions, taps, valid))

    def propose(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        cache: KVCache,
        state: VoteState,
        context: Context,
        keys: Keys,
    ) -> tuple[Draft, VoteState, KVCache]:
        """One vote a run."""
        # The next run, or the next step, feeds the voted tokens over each member's own.
        members = self.members.resized(self.run).reading(self.run + 1)
        accuracy_bj = (tables["accuracy"] * CONFIDENCE + state.hits) / (CONFIDENCE + state.trials)
        likeliest = dataclasses.replace(context.sampling, greedy=True)

        def one_run(carry: tuple[Any, KVCache, Context], _: None) -> tuple[Any, Any]:
            own, cache, here = carry
            drafts, own, cache = members.propose(params, tables["members"], target, cache, own, here, keys)
            runs_bjr = jnp.stack([proposed(draft) for draft in drafts], axis=1)
            winner_b, agree_b = vote(runs_bjr, accuracy_bj)
            run_br = jnp.take_along_axis(runs_bjr, winner_b[:, None, None], axis=1)[:, 0]
            agree_br = jnp.broadcast_to(agree_b[:, None], run_br.shape)
            return (own, cache, continued(here, run_br)), (run_br, agree_br, runs_bjr.swapaxes(1, 2))

        start = (state.members, cache, dataclasses.replace(context, sampling=likeliest))
        (own, cache, _), found = jax.lax.scan(one_run, start, None, length=self.num_nodes // self.run)
        # [R, B, r, ...] to [B, R r, ...].
        tokens_bn, agreeing, ballots = jax.tree.map(
            lambda x: x.swapaxes(0, 1).reshape(x.shape[1], self.num_nodes, *x.shape[3:]), found
        )
        proposal = chain(jnp.maximum(tokens_bn, 0), laws=None)
        proposal = dataclasses.replace(proposal, valid=jnp.cumprod(tokens_bn >= 0, axis=1).astype(bool))
        state = dataclasses.replace(state, members=own, ballots=ballots, agreeing=agreeing)
        return proposal, state, cache

    def commit(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: VoteState,
        context: Context,
        draft: Draft,
        scores: Scores,
        verdict: Verdict,
    ) -> VoteState:
        """Holds the ballots against what the target chose, as far as that shares their context."""
        parts = (params, tables["members"], target, state.members)
        members = self.members.commit(*parts, context, draft, scores, verdict)
        block_bd1 = emitted_block(draft, verdict)[:, : self.num_nodes, None]
        reached_bd = jnp.arange(self.num_nodes) <= verdict.num_accepted[:, None]
        new_b = context.length > state.counted
        right_bdj = state.ballots == block_bd1
        judged_bdj = reached_bd[..., None] & (state.ballots >= 0) & _own_run_so_far(right_bdj, self.run)
        judged_bdj &= new_b[:, None, None]
        return dataclasses.replace(
            state,
            members=members,
            hits=state.hits + jnp.sum(judged_bdj & right_bdj, axis=1),
            trials=state.trials + jnp.sum(judged_bdj, axis=1),
            outcomes=state.outcomes + self._outcomes(state, draft, verdict, reached_bd & new_b[:, None]),
            counted=context.length,
        )

    def observed(self, state: VoteState) -> dict[str, Any]:
        """For reports: `by_agreement`, of the tokens that a share of the voters agreed on, verified and accepted ones.

        Keys are such as `2/3`: agreeing members over voters, in lowest terms.
        """
        found = acceptance_by_share(np.asarray(state.outcomes))
        return {"by_agreement": {f"{s.numerator}/{s.denominator}": list(counts) for s, counts in found.items()}}

    def _outcomes(self, state: VoteState, draft: Draft, verdict: Verdict, reached_bd: jax.Array) -> jax.Array:
        """`[B, J, J, 2]`, see `VoteState.outcomes`."""
        count = self.members.count
        # Who votes on a run votes on its first token.
        first = (jnp.arange(self.num_nodes) // self.run) * self.run
        voters_bd = jnp.sum(state.ballots[:, first] >= 0, axis=-1)
        tried_bd = reached_bd & draft.valid
        accepted_bd = tried_bd & (jnp.arange(self.num_nodes) < verdict.num_accepted[:, None])
        agree = jax.nn.one_hot(state.agreeing - 1, count, dtype=jnp.int32)
        voters = jax.nn.one_hot(voters_bd - 1, count, dtype=jnp.int32)
        both = jnp.stack([tried_bd, accepted_bd], axis=-1).astype(jnp.int32)
        return jnp.einsum("bda,bdn,bdo->bano", agree, voters, both)


def proposed(draft: Draft) -> jax.Array:
    """`[B, n]` tokens of a member's chain, -1 where it proposes none.

    Raises:
        ValueError: the draft is a tree.
    """
    if not draft.is_chain:
        raise ValueError("a member drafts a tree, of which no single run follows; use ensemble_union for trees")
    return jnp.where(draft.valid, draft.tokens, -1)


def vote(runs_bjr: jax.Array, accuracy_bj: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The member whose run the most members proposed, and how many they are.

    Args:
        runs_bjr: int32 tokens, -1 for none; a run without a first token is no vote.
        accuracy_bj: in [0, 1]; of the members behind a run, their sum breaks ties.

    Returns:
        `(winner [B], agreeing [B])` int32; 0 agree where nobody votes.
    """
    votes_bj = runs_bjr[..., 0] >= 0
    same_bij = (runs_bjr[:, :, None] == runs_bjr[:, None]).all(-1) & votes_bj[:, :, None] & votes_bj[:, None]
    agree_bj = same_bij.sum(1)
    support_bj = jnp.sum(same_bij * accuracy_bj[:, :, None], axis=1) / (runs_bjr.shape[1] + 1)  # below one vote
    winner_b = jnp.argmax(jnp.where(votes_bj, agree_bj + support_bj, -1.0), axis=1).astype(jnp.int32)
    agreeing_b = jnp.take_along_axis(agree_bj, winner_b[:, None], axis=1)[:, 0]
    return winner_b, agreeing_b.astype(jnp.int32)


def acceptance_by_share(outcomes_bjj2: np.ndarray) -> dict[Fraction, tuple[int, int]]:
    """How many voted tokens were verified and how many accepted, by the share of the voters that agreed.

    Args:
        outcomes_bjj2: `VoteState.outcomes`.
    """
    counts_jj2 = np.asarray(outcomes_bjj2).sum(axis=0)
    found: dict[Fraction, tuple[int, int]] = {}
    for (a, n), (verified, accepted) in zip(np.ndindex(counts_jj2.shape[:2]), counts_jj2.reshape(-1, 2), strict=True):
        if verified:
            share = Fraction(a + 1, n + 1)
            before = found.get(share, (0, 0))
            found[share] = (before[0] + int(verified), before[1] + int(accepted))
    return dict(sorted(found.items()))


def continued(context: Context, run_br: jax.Array) -> Context:
    """The context as if these tokens were committed (0 where there is none)."""
    rows, width = jnp.arange(run_br.shape[0])[:, None], run_br.shape[1]
    slots = context.length[:, None] + jnp.arange(width)
    run_br = jnp.maximum(run_br, 0)
    tokens = context.tokens.at[rows, slots].set(run_br, mode="drop")
    history = context.history
    if history is not None:
        history = history.add(run_br, jnp.full_like(context.length, width))
    return dataclasses.replace(context, tokens=tokens, length=context.length + width, history=history)


def _own_run_so_far(right_bdj: jax.Array, run: int) -> jax.Array:
    """Whether a member's earlier tokens of the same run were all right: only then was its next one asked for."""
    batch, depth, count = right_bdj.shape
    runs = right_bdj.reshape(batch, depth // run, run, count)
    before = jnp.concatenate([jnp.ones_like(runs[:, :, :1]), runs[:, :, :-1]], axis=2)
    return jnp.cumprod(before, axis=2).astype(bool).reshape(right_bdj.shape)
