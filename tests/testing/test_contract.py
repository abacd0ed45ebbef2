"""What the contract of a drafter must catch: laws that were not drawn from, and choices that depend on the batch."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import pytest

from specjax.decoding import Keys
from specjax.decoding.sampling import DRAFT
from specjax.decoding.tree import TreeSpec
from specjax.drafting import PromptLookup
from specjax.testing import contract
from specjax.testing.decode_law import check_law
from specjax.testing.faults import CHAIN, PAIR, EditedTree, planted
from specjax.testing.sequences import LETTERS, markov_target, mild_law
from specjax.testing.subject import Subject
from specjax.testing.tables import TableTree, table_params
from specjax.verification import Recursive

FEW = 1 << 13


def subject(drafter, tables=None) -> Subject:
    target = markov_target()
    return Subject(target.graph, target.params, drafter, table_params(LETTERS, 4), tables or {})


@pytest.mark.pitfall("transformers#47932", "rtp-llm#1311")
@pytest.mark.parametrize(
    "name",
    [pytest.param("raw q for a warped draw", marks=pytest.mark.slow), "d2t applied to tokens but not to q"],
)
def test_a_law_that_was_not_drawn_from_fails(name):
    fault = planted()[name]
    with pytest.raises(AssertionError, match="the law of 3 tokens is not the target's"):
        contract.check_drafter(subject(fault.drafter, fault.tables), Recursive, draws=FEW)
    check_law(subject(fault.sound_drafter, fault.tables), Recursive, draws=FEW)


def test_a_law_misstated_deep_in_a_chain_fails():
    """The fourth token is the likeliest, reported as drawn."""

    def edit(params, context, draft):
        likeliest = jnp.argmax(params["logits"][draft.tokens[:, 2]], -1).astype(jnp.int32)
        return dataclasses.replace(draft, tokens=draft.tokens.at[:, 3].set(likeliest))

    target = markov_target()
    table = {"logits": jnp.log(jnp.asarray(mild_law())) + 0.5 * table_params(LETTERS, 1)["logits"]}
    of_four = EditedTree(TreeSpec((-1, 0, 1, 2)), edit=edit)
    with pytest.raises(AssertionError, match="the law of 5 tokens is not the target's"):
        check_law(Subject(target.graph, target.params, of_four, table, {}), Recursive, draws=1 << 15)


@dataclasses.dataclass(frozen=True)
class OfTheSlot(TableTree):
    """Draws with a key of the row's place in the batch."""

    def draw(self, keys: Keys, node: int, law_bv: jax.Array) -> jax.Array:
        return keys.sample(DRAFT, node + 64 * jnp.arange(law_bv.shape[0]), law_bv)


@flax.struct.dataclass
class SlotKeys(Keys):
    """Keys of the row's place in the batch."""

    def at(self, purpose, position_b, slot):
        return super().at(purpose, position_b, slot + 64 * jnp.arange(position_b.shape[0]))


@dataclasses.dataclass(frozen=True)
class SlotRule(Recursive):
    """Accepts with uniforms of the row's place in the batch."""

    def verify(self, draft, scores, sampling, keys):
        return super().verify(draft, scores, sampling, SlotKeys(keys.request, keys.length))


@pytest.mark.pitfall("vllm#6038")
@pytest.mark.parametrize(("drafter", "rule"), [(OfTheSlot(CHAIN), Recursive), (TableTree(CHAIN), SlotRule)])
def test_what_depends_on_the_slot_fails(drafter, rule):
    """Both keep the law, and greedy texts."""
    sampled = contract.random_requests(LETTERS, contract.BATCH, seed=1, temperature=1.0)
    with pytest.raises(AssertionError, match="differs from the same request in another slot"):
        contract.check_rows_are_independent(subject(drafter), rule, sampled)


def test_a_law_that_nothing_shows_is_not_passed():
    with pytest.raises(ValueError, match="none of 512 decodes .* accepted a draft token.*four_token_target"):
        check_law(subject(PromptLookup(2, min_ngram=3)), Recursive, prompt=(0, 1), draws=512)
    with pytest.raises(ValueError, match="prompt 0 holds token 4"):
        check_law(subject(TableTree(PAIR)), Recursive, prompt=(4,))


class OfTheBatch(TableTree):
    """Draws with a key of how many rows there are."""

    def draw(self, keys: Keys, node: int, law_bv: jax.Array) -> jax.Array:
        return keys.sample(DRAFT, node + 64 * law_bv.shape[0], law_bv)


@pytest.mark.pitfall("vllm#6038")
def test_what_depends_on_the_batch_fails():
    sampled = contract.random_requests(LETTERS, contract.BATCH, seed=1, temperature=1.0)
    with pytest.raises(AssertionError, match="differs from the same request alone"):
        contract.check_alone(subject(OfTheBatch(CHAIN)), Recursive, sampled)
