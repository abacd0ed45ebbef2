"""Faults that are planted on purpose: drafts that misstate their law, rules that correct for the wrong one.

Every one of them has been made by somebody (the names say how), runs in the loop like a sound drafter or rule, and
gives fluent text. A test of exactness is worth as much as it catches of these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import Context, Draft, Drafter, Keys, Kind, Rule, Sampling, Scores, Verdict, log_law
from specjax.decoding.sampling import ACCEPT, RESIDUAL
from specjax.decoding.tree import TreeSpec, ancestors
from specjax.models import Decoder, KVCache
from specjax.testing.sequences import LETTERS, mild_law
from specjax.testing.tables import TableTree, table_params
from specjax.verification import Block, Recursive

PLAIN: Mapping[str, float] = MappingProxyType({"temperature": 1.0})
WARPED: Mapping[str, float] = MappingProxyType({"temperature": 0.7, "top_k": 3, "top_p": 0.95})
PENALISED: Mapping[str, float] = MappingProxyType({"temperature": 1.0, "frequency_penalty": 1.5})

ONE, PAIR, SIBLINGS = TreeSpec((-1,)), TreeSpec((-1, 0)), TreeSpec((-1, -1, -1))
CHAIN = TreeSpec((-1, 0, 1))
REVERSED = (3, 2, 1, 0)
# Of the tables tried by enumeration, the one on which keys reused under block verification show most.
SEED = 4

# (params, context, draft) -> draft
Edit = Callable[[Any, Context, Draft], Draft]
# (draft, scores, sampling, keys, verdict) -> next token [B]
Redraw = Callable[[Draft, Scores, Sampling, Keys, Verdict], jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Fault:
    """A faulty drafter or rule for a vocabulary of four, and its sound twin.

    On `markov_target` each of them moves the law of three tokens by a total variation of several hundredths.

    Attributes:
        drafter: faulty, or sound where the rule is not.
        rule: faulty, or sound where the drafter is not.
        sound_drafter: the same without the fault.
        sound_rule: the same without the fault.
        rule_name: of the sound rule.
        sampling: fields of a `Request` under which the fault shows.
        params: of both drafters.
        tables: of both drafters.
    """

    drafter: Drafter
    rule: Rule
    sound_drafter: Drafter
    sound_rule: Rule
    rule_name: str = "recursive"
    sampling: Mapping[str, float] = dataclasses.field(default_factory=lambda: PLAIN)
    params: Any = dataclasses.field(default_factory=lambda: table_params(LETTERS, SEED))
    tables: Any = dataclasses.field(default_factory=dict)


# ---- Drafts ----


@dataclasses.dataclass(frozen=True)
class EditedTree(TableTree):
    """A table's tree, changed after it was drawn.

    Attributes:
        edit: the change.
    """

    edit: Edit = dataclasses.field(kw_only=True)

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
        """See `TableTree.propose`."""
        draft, state, cache = super().propose(params, tables, target, cache, state, context, keys)
        return self.edit(params, context, draft), state, cache


def report_raw_law(params: Any, context: Context, draft: Draft) -> Draft:
    """The token was drawn from the warped law; the law before the warps is reported."""
    raw = dataclasses.replace(
        context.sampling, temperature=jnp.ones_like(context.sampling.temperature), warps=frozenset()
    )
    last = jnp.concatenate([context.last(1), draft.tokens[:, :-1]], axis=1)
    return dataclasses.replace(draft, laws=log_law(params["logits"][last], raw))


def take_argmax(params: Any, context: Context, draft: Draft) -> Draft:
    """The likeliest token is taken; the law is reported as if it had been drawn."""
    last = context.last(1)[:, 0]
    return dataclasses.replace(
        draft, tokens=draft.tokens.at[:, 0].set(jnp.argmax(params["logits"][last], -1).astype(jnp.int32))
    )


def report_independent(params: Any, context: Context, draft: Draft) -> Draft:
    """Siblings were drawn without replacement; each is scored with the unconditional law."""
    del params, context
    return dataclasses.replace(draft, siblings="iid")


def sort_siblings(params: Any, context: Context, draft: Draft) -> Draft:
    """Drawn siblings are tried in the order of their own probability."""
    del params, context
    order = jnp.argsort(-_own_q(draft), axis=1)
    return dataclasses.replace(draft, tokens=jnp.take_along_axis(draft.tokens, order, axis=1))


def drop_unlikely(params: Any, context: Context, draft: Draft) -> Draft:
    """A drawn token is thrown away, with what follows, because its own probability is low."""
    del params, context
    return dataclasses.replace(draft, valid=draft.valid & (jnp.cumprod(_own_q(draft) > jnp.log(0.3), axis=1) > 0))


def keep_best_two(params: Any, context: Context, draft: Draft) -> Draft:
    """Of the drawn siblings a re-rank keeps the two that are likeliest."""
    del params, context
    worst = jnp.argmin(_own_q(draft), axis=1)
    return dataclasses.replace(draft, valid=draft.valid & (jnp.arange(draft.num_nodes) != worst[:, None]))


def forget_the_map(params: Any, context: Context, draft: Draft) -> Draft:
    """Draft ids were mapped to target ids in the tokens and not in the laws."""
    del params, context
    return dataclasses.replace(draft, vocab=None)


def _own_q(draft: Draft) -> jax.Array:
    """`[B, N]` log-probability of each token under the law it was drawn from; ids of draft and target agree."""
    laws = jnp.take_along_axis(draft.laws, draft.law[..., None], axis=1)
    return jnp.take_along_axis(laws, draft.tokens[..., None], axis=2)[..., 0]


class OneUniform(TableTree):
    """Draws by inverse distribution function, from the uniforms that will decide on acceptance."""

    def draw(self, keys: Keys, node: int, law_bv: jax.Array) -> jax.Array:
        """See `TableTree.draw`."""
        return _inverse(jnp.exp(law_bv), keys.uniform(ACCEPT, node))


@dataclasses.dataclass(frozen=True)
class ConfidentMember(TableTree):
    """Two members draw a token each; the one that gives its own token more is sent, with that member's law.

    The sound twin looks at the laws alone: the member whose likeliest token is likelier.

    Attributes:
        looks: whether the choice looks at the tokens.
    """

    looks: bool = True

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
        """One node."""
        last = context.last(1)[:, 0]
        laws = jnp.stack([self.law({"logits": member}, last, context.sampling) for member in params["members"]], axis=1)
        tokens = jnp.stack([self.draw(keys, member, laws[:, member]) for member in range(laws.shape[1])], axis=1)
        own = jnp.take_along_axis(laws, tokens[..., None], axis=2)[..., 0]
        best = jnp.argmax(own if self.looks else laws.max(-1), axis=1)[:, None]
        token, law = jnp.take_along_axis(tokens, best, axis=1), jnp.take_along_axis(laws, best[..., None], axis=1)
        return self.spec.draft(token, law=jnp.zeros_like(token), laws=law), state, cache


# ---- Rules ----


@dataclasses.dataclass(frozen=True)
class Redrawn:
    """A sound rule for chains whose token behind the accepted path is drawn again, in a wrong way.

    Attributes:
        inner: the sound rule.
        redraw: the next token of each row.
    """

    inner: Rule
    redraw: Redraw

    @property
    def exact_for(self) -> frozenset[Kind]:
        """What it claims."""
        return self.inner.exact_for

    def verify(self, draft: Draft, scores: Scores, sampling: Sampling, keys: Keys) -> Verdict:
        """See `Rule.verify`."""
        verdict = self.inner.verify(draft, scores, sampling, keys)
        return dataclasses.replace(verdict, next_token=self.redraw(draft, scores, sampling, keys, verdict))


def residual_not_normalised(
    draft: Draft, scores: Scores, sampling: Sampling, keys: Keys, verdict: Verdict
) -> jax.Array:
    """An inverse distribution function over max(p - q, 0), which falls short of one: the last token gets what lacks."""
    node, rejected = verdict.num_accepted, verdict.num_accepted < draft.num_nodes
    p, q = _at(jnp.exp(log_law(scores.logits, sampling)), node), _rejected_law(draft, node)
    short = _inverse(jnp.maximum(p - q, 0.0), keys.uniform(RESIDUAL, node + 1))
    return jnp.where(rejected, short, verdict.next_token)


def residual_from_raw_p(draft: Draft, scores: Scores, sampling: Sampling, keys: Keys, verdict: Verdict) -> jax.Array:
    """The residual of the target's law before the warps."""
    node, rejected = verdict.num_accepted, verdict.num_accepted < draft.num_nodes
    left = jnp.maximum(jax.nn.softmax(_at(scores.logits, node)) - _rejected_law(draft, node), 0.0)
    return jnp.where(rejected, keys.sample(RESIDUAL, node + 1, jnp.log(left)), verdict.next_token)


def bonus_from_parent(draft: Draft, scores: Scores, sampling: Sampling, keys: Keys, verdict: Verdict) -> jax.Array:
    """After a fully accepted chain the bonus comes from the row before the last."""
    law = log_law(scores.logits[:, draft.num_nodes - 1], sampling)
    wrong = keys.sample(RESIDUAL, verdict.num_accepted + 1, law)
    return jnp.where(verdict.num_accepted == draft.num_nodes, wrong, verdict.next_token)


def _rejected_law(draft: Draft, node_b: jax.Array) -> jax.Array:
    """`[B, V]` law of the chain's node that was rejected."""
    return jnp.exp(_at(draft.laws, jnp.minimum(node_b, draft.num_nodes - 1)))


def _at(x_bmv: jax.Array, index_b: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_bmv, index_b[:, None, None], axis=1)[:, 0]


def _inverse(weights_bv: jax.Array, u_b: jax.Array) -> jax.Array:
    """Draws `[B]` by inverse distribution function; the last id where the weights end below u."""
    below = (jnp.cumsum(weights_bv, axis=-1) <= u_b[:, None]).sum(-1)
    return jnp.minimum(below, weights_bv.shape[-1] - 1).astype(jnp.int32)


@flax.struct.dataclass
class PositionKeys(Keys):
    """Uniforms of acceptance by absolute position alone: the next step meets them again."""

    def at(self, purpose: int, position_b: jax.Array, slot: jax.Array | int) -> jax.Array:
        """See `Keys.at`."""
        if purpose == ACCEPT:
            return super().at(purpose, position_b + slot, 0)
        return super().at(purpose, position_b, slot)


@dataclasses.dataclass(frozen=True)
class ReusedKeys:
    """A rule that is given `PositionKeys`. Harmless token by token; block verification looks ahead.

    Attributes:
        inner: the sound rule.
    """

    inner: Rule

    @property
    def exact_for(self) -> frozenset[Kind]:
        """What it claims."""
        return self.inner.exact_for

    def verify(self, draft: Draft, scores: Scores, sampling: Sampling, keys: Keys) -> Verdict:
        """See `Rule.verify`."""
        return self.inner.verify(draft, scores, sampling, PositionKeys(keys.request, keys.length))


@dataclasses.dataclass(frozen=True)
class ForgetfulPenalties:
    """A rule over scores whose frequency penalty left out the node's own drafted ancestors.

    Attributes:
        inner: the sound rule.
    """

    inner: Rule

    @property
    def exact_for(self) -> frozenset[Kind]:
        """What it claims."""
        return self.inner.exact_for

    def verify(self, draft: Draft, scores: Scores, sampling: Sampling, keys: Keys) -> Verdict:
        """See `Rule.verify`."""
        assert sampling.penalties is not None, "the fault shows under a frequency penalty"
        on_path_bmn = ancestors(draft.parents)[:, :, 1:].astype(jnp.float32)
        times_bnv = jax.nn.one_hot(draft.tokens, scores.logits.shape[-1])
        forgotten = sampling.penalties.frequency[:, None, None] * (on_path_bmn @ times_bnv)
        return self.inner.verify(draft, dataclasses.replace(scores, logits=scores.logits + forgotten), sampling, keys)


def _drafts(edit: Edit, spec: TreeSpec, siblings: Any = "iid", **more: Any) -> Fault:
    """A fault of the draft, under the recursive rule."""
    rule = Recursive(spec.depth)
    return Fault(EditedTree(spec, siblings, edit=edit), rule, TableTree(spec, siblings), rule, **more)


def _rules(faulty: Callable[[Rule], Rule], spec: TreeSpec, sound: Rule | None = None, **more: Any) -> Fault:
    """A fault of the rule, on a sound draft."""
    rule, drafter = sound or Recursive(spec.depth), TableTree(spec)
    return Fault(drafter, faulty(rule), drafter, rule, **more)


def _members() -> dict[str, jax.Array]:
    return {"members": jnp.stack([table_params(LETTERS, seed)["logits"] for seed in (SEED, SEED + 1)])}


def _likely() -> dict[str, jax.Array]:
    """A table near the law of `markov_target`."""
    return {"logits": jnp.asarray(np.log(mild_law()), jnp.float32) + 0.3 * table_params(LETTERS, SEED)["logits"]}


def planted() -> dict[str, Fault]:
    """Every fault by name."""
    one = Recursive(ONE.depth)
    return {
        "raw q for a warped draw": _drafts(report_raw_law, PAIR, sampling=WARPED),
        "argmax child with a soft q": _drafts(take_argmax, ONE),
        "residual not renormalised": _rules(lambda r: Redrawn(r, residual_not_normalised), PAIR),
        "residual from raw p": _rules(lambda r: Redrawn(r, residual_from_raw_p), PAIR, sampling=WARPED),
        # A draft that is mostly accepted whole, whatever stands before it: else there is hardly a bonus.
        "bonus from the wrong row": _rules(lambda r: Redrawn(r, bonus_from_parent), PAIR, params=_likely()),
        "without-replacement siblings scored with the unconditional q": _drafts(
            report_independent, SIBLINGS, "without_replacement"
        ),
        "sampled siblings sorted by their own q": _drafts(sort_siblings, SIBLINGS),
        "sampled token dropped because its own q is low": _drafts(drop_unlikely, PAIR),
        "sampled nodes pruned by a re-rank": _drafts(keep_best_two, SIBLINGS),
        "ensemble member chosen by its tokens, verified with its q": Fault(
            ConfidentMember(ONE), one, ConfidentMember(ONE, looks=False), one, params=_members()
        ),
        "one uniform for draft and accept": Fault(OneUniform(PAIR), Recursive(2), TableTree(PAIR), Recursive(2)),
        "keys reused between steps under block verification": _rules(
            ReusedKeys, PAIR, Block(PAIR.depth), rule_name="block"
        ),
        "penalties that ignore drafted ancestors": _rules(ForgetfulPenalties, CHAIN, sampling=PENALISED),
        "d2t applied to tokens but not to q": _drafts(
            forget_the_map, PAIR, tables={"vocab": jnp.asarray(REVERSED, jnp.int32)}
        ),
    }
