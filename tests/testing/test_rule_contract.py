"""What the contract of a rule must catch: rules whose single steps keep the law of a small tree, and that are wrong."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import pytest

from specjax.decoding import Keys, make_sampling
from specjax.testing import check_rule, laws
from specjax.testing.faults import ReusedKeys
from specjax.testing.laws import chain_draft, decodes_p_value, tree_draft
from specjax.testing.rule_contract import check_steps
from specjax.verification import Block, Recursive, Traversal
from specjax.verification.recursive import Rejections
from specjax.verification.walk import walk_down

FEW = 1 << 14


def planted(change):
    """A recursive rule whose verdict or arguments are changed."""

    @dataclasses.dataclass(frozen=True)
    class Planted(Recursive):
        def verify(self, draft, scores, sampling, keys):
            return change(super().verify, draft, scores, sampling, keys)

    return Planted


@flax.struct.dataclass
class SlotKeys(Keys):
    def at(self, purpose, position_b, slot):
        return super().at(purpose, position_b, slot + 64 * jnp.arange(position_b.shape[0]))


def not_strict(verify, draft, scores, sampling, keys):
    """`>=` for `>`: a uniform of 0 accepts what is impossible."""
    least = jnp.where(jnp.isneginf(scores.logits), -60.0, scores.logits)  # Its exp is no denormal number.
    zero = keys.uniform(0, 0) == 0
    return verify(draft, scores.replace(logits=jnp.where(zero[:, None, None], least, scores.logits)), sampling, keys)


def blind_to_faults(verify, *step):
    verdict = verify(*step)
    return verdict.replace(fault=jnp.full_like(verdict.fault, -1))


def faults_by_the_maximum(verify, draft, scores, sampling, keys):
    """XLA's maximum on CPUs drops a NaN where arrays are large."""
    bad = ~jnp.isfinite(jnp.max(scores.logits, -1))
    verdict = verify(draft, scores, sampling, keys)
    found = jnp.take_along_axis(bad, jnp.maximum(verdict.fault, 0)[:, None], 1)[:, 0]
    return verdict.replace(fault=jnp.where(found, verdict.fault, -1))


def faults_of_drafts(verify, draft, scores, sampling, keys):
    """Nodes that nothing reached end the text too."""
    verdict = verify(draft, scores, sampling, keys)
    bad = jnp.isnan(scores.logits).any((1, 2))
    return verdict.replace(fault=jnp.where(bad & (verdict.fault < 0), 1, verdict.fault))


def draws_at_temperature_0(verify, draft, scores, sampling, keys):
    warm = make_sampling([1.0]).temperature
    return verify(draft, scores, sampling.replace(temperature=jnp.maximum(sampling.temperature, warm)), keys)


def takes_invalid_nodes(verify, draft, scores, sampling, keys):
    return verify(draft.replace(valid=jnp.ones_like(draft.valid)), scores, sampling, keys)


def of_the_slot(verify, draft, scores, sampling, keys):
    return verify(draft, scores, sampling, SlotKeys(keys.request, keys.length))


def of_the_first_row(verify, draft, scores, sampling, keys):
    """All rows accept with the uniforms of one."""
    same = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), keys)
    return verify(draft, scores, sampling, same)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (not_strict, "of which the target's law is 0, at uniform 0"),
        (blind_to_faults, "gives fault -1 in row 0, of three with no law at the root; expected 0"),
        (faults_by_the_maximum, "gives fault -1 in row 0, of three with no law at the root; expected 0"),
        (faults_of_drafts, "where only nodes that cannot be accepted have no law; expected -1"),
        (draws_at_temperature_0, "at temperature 0; expected"),
        (takes_invalid_nodes, "expected valid nodes from the root down"),
        (of_the_slot, "decides otherwise on the same row . in another slot"),
        (of_the_first_row, "decides otherwise on the same row . in another slot"),
    ],
)
def test_a_planted_rule_fails(change, says):
    with pytest.raises(AssertionError, match=says):
        check_rule(planted(change), draws=FEW)


class ForgetfulBelow(Rejections):
    """A child below the first level that is rejected leaves p as it was, unless it is the last."""

    def left(self, draft, node_b, last_b, scale_b, p_bv, q_bv):
        left_bv = super().left(draft, node_b, last_b, scale_b, p_bv, q_bv)
        return jnp.where(((node_b >= 0) & ~last_b)[:, None], p_bv, left_bv)


@dataclasses.dataclass(frozen=True)
class Forgetful(Recursive):
    def verify(self, draft, scores, sampling, keys):
        return walk_down(draft, scores, sampling, keys, self.depth, ForgetfulBelow())


def test_siblings_below_the_root_are_tested():
    with pytest.raises(AssertionError, match="does not keep the target's law on a 'iid' draft"):
        check_rule(lambda depth: Forgetful(depth, frozenset({"iid"})), draws=1 << 16)


@pytest.mark.slow
@pytest.mark.pitfall("vllm#6038")
def test_uniforms_that_a_later_step_meets_again_fail():
    """In a single step the rule is sound."""
    with pytest.raises(AssertionError, match="does not keep the target's law over several steps"):
        check_rule(lambda depth: ReusedKeys(Block(depth)), draws=1 << 16, chains_only=True)
    check_steps(lambda depth: ReusedKeys(Traversal(depth)), tree_draft("iid"))
    assert decodes_p_value(Block(laws.DEPTH), "iid", draws=1 << 16) > 1e-6


def test_a_rule_that_accepts_nothing_passes():
    """It is plain decoding, and exact."""

    def nothing(verify, draft, *rest):
        return verify(draft.replace(valid=jnp.zeros_like(draft.valid)), *rest)

    check_steps(planted(nothing), chain_draft("fixed"))


@pytest.mark.parametrize(
    ("make_rule", "says"),
    [
        (object(), "make_rule=<object .* expected a rule's class"),
        (object, r"make_rule\(2\) gives no rule \(object\(\) takes no arguments\)"),
        (lambda depth: {}, r"make_rule\(2\) gives no rule \(unhashable type"),
        (lambda depth: depth, r"make_rule\(2\) gives 2; expected verify"),
        (planted(lambda verify, *step: None), "Planted.verify returned NoneType; expected a .*Verdict"),
    ],
)
def test_what_is_no_rule_is_one_clear_error(make_rule, says):
    with pytest.raises(ValueError, match=says):
        check_rule(make_rule)
