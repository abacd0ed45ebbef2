"""Who may be a member of an ensemble: heads on the target's hidden states; drafters of its vocabulary alone."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from specjax.drafting import DraftModel, PromptLookup
from specjax.drafting.eagle import EagleChain
from specjax.drafting.ensemble import EnsembleUnion, Members, assemble
from specjax.models import merge
from specjax.models.eagle import EagleConfig, draft_layer
from specjax.testing import contract
from specjax.testing.markov import markov_config, markov_graph, markov_params, random_law
from specjax.verification import Recursive
from tests.drafting.test_ensembles import MAKERS, VOCAB, accepted, config, noisy, target

HEAD = EagleChain(
    EagleConfig(layer=draft_layer(config(), intermediate_size=24, head_size=VOCAB)),
    num_nodes=3,
)


def headed(name: str) -> contract.Subject:
    """A head on the target's hidden states, a draft model and prompt lookup."""
    own, none = HEAD.init_params(jax.random.key(9), merge(*target()))
    drafters = [HEAD, DraftModel(config(), num_nodes=3), PromptLookup(num_nodes=3)]
    members, params, tables = assemble(drafters, [own, noisy(1), {}], [none, {}, {}])
    drafter = MAKERS[name](members)
    return contract.Subject(*target(), drafter, params, drafter.tables(tables), eos=(2, 5))


@pytest.mark.parametrize("name", ["union", pytest.param("early_exit_proxy", marks=pytest.mark.slow)])
def test_a_head_is_a_member(name: str) -> None:
    """What it reads of the target is that of the path which the ensemble took, whichever member's it was."""
    sub, requests = dataclasses.replace(headed(name), eos=()), contract.random_requests(VOCAB, 3, seed=4)
    assert accepted(contract.check_equals_autoregressive(sub, Recursive, requests)) > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["union", "calibrated_proxy"])
def test_contract_with_a_head(name: str) -> None:
    contract.check_drafter(headed(name), Recursive)


@pytest.mark.slow
def test_law_with_a_head() -> None:
    layer = draft_layer(markov_config(4), intermediate_size=2, head_size=4)
    head = EagleChain(EagleConfig(layer=layer), num_nodes=2)
    decoder = merge(markov_graph(4), markov_params(random_law(4, 0)))
    own, none = head.init_params(jax.random.key(1), decoder)
    draft = DraftModel(markov_config(4), num_nodes=2)
    members, params, tables = assemble([head, draft], [own, markov_params(random_law(4, 7))], [none, {}])
    assert contract.law_p_value(EnsembleUnion(members), params, {"members": tables}, Recursive, draws=1 << 14) > 1e-6


def test_members_write_the_targets_tokens() -> None:
    """At temperature 0 there are no laws whose shapes would tell."""
    larger = DraftModel(dataclasses.replace(config(), vocab_size=VOCAB + 3, head_size=VOCAB + 3), num_nodes=2)
    members = Members((PromptLookup(num_nodes=2), larger))
    with pytest.raises(ValueError, match=f"DraftModel writes {VOCAB + 3} tokens, the target has {VOCAB}"):
        members.init_state(({}, {}), ({}, {}), merge(*target()), 1, 32)
