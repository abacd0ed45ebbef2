"""Every registered drafter, and a stub of every shape to come, through the whole contract."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Loop, Request, generate
from specjax.drafting import DraftModel, PromptLookup
from specjax.models import ModelConfig, RopeConfig, graph, init_decoder, merge
from specjax.testing import contract
from specjax.testing.markov import markov_config, markov_graph, markov_params, random_law
from specjax.verification import Greedy, OneHot, Recursive
from tests.contract.stubs import STUBS

VOCAB = 13


def config(layers: int) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=VOCAB,
        head_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        max_position=1 << 14,
        norm_eps=1e-5,
        query_scale=0.5,
        windows=(7, None)[:layers],
        ropes=(RopeConfig(),) * layers,
        tie_embeddings=True,
    )


def target_params():
    return jax.tree.map(lambda x: 2.5 * x if x.ndim > 1 else x, init_decoder(config(2), jax.random.key(0)))


def subject(name: str) -> contract.Subject:
    static, params = graph(config(2))[0], target_params()
    if name == "draft_model":
        drafter = DraftModel(config(1), num_nodes=3, shares=("embed",))
    elif name == "prompt_lookup":
        drafter = PromptLookup(num_nodes=3)
    else:
        drafter = STUBS[name]
    own, tables = drafter.init_params(jax.random.key(1), merge(static, params))
    return contract.Subject(static, params, drafter, own, tables, eos=(2, 5))


NAMES = ["draft_model", "prompt_lookup", *STUBS]
# Lookups, trees of features, Jacobi's window and early exits have their contracts in tests/drafting too.
ELSEWHERE = ("prompt_lookup", "early_exit", "jacobi_window", "feature_tree")
SLOWLY = [pytest.param(x, marks=pytest.mark.slow) if x in ELSEWHERE else x for x in NAMES]


@pytest.mark.pitfall("vllm#6038")
@pytest.mark.parametrize("name", SLOWLY)
def test_contract(name):
    contract.check_drafter(subject(name), Recursive, draws=1 << 13)
    # Equality would be empty if nothing were ever accepted. Texts of full length repeat themselves.
    endless = dataclasses.replace(subject(name), eos=())
    requests = [Request(tuple(np.arange(n) % VOCAB), 60, id=n) for n in (20, 30, 40)]
    done = contract.check_equals_autoregressive(endless, Recursive, requests)
    assert sum(c.accepted[1:].sum() for c in done) > 0


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Greedy, OneHot])
@pytest.mark.parametrize("name", NAMES)
def test_other_rules_are_greedy_too(name, rule):
    requests = contract.random_requests(VOCAB, 4, seed=2)
    contract.check_equals_autoregressive(subject(name), rule, requests)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_law_of_whole_decodes(name):
    """The loop with the recursive rule, short decodes against the exact law."""
    drafter = DraftModel(markov_config(4), num_nodes=3) if name == "draft_model" else subject(name).drafter
    if name == "early_exit":
        drafter = dataclasses.replace(drafter, layer=0)  # the Markov target has one layer
    own, tables = drafter.init_params(jax.random.key(1), merge(markov_graph(4), markov_params(random_law(4, 0))))
    assert contract.law_p_value(drafter, own, tables, Recursive, draws=1 << 17) > 1e-6


def test_budget_edges_are_exact():
    for name in ("draft_model", "feature_tree"):
        sub = dataclasses.replace(subject(name), eos=())
        requests = [Request((1, 2, 3), budget, id=budget) for budget in range(1, 21)]
        done = contract.check_equals_autoregressive(sub, Recursive, requests)
        assert [len(c.tokens) for c in done] == list(range(1, 21))
        assert {c.finish for c in done} == {"length"}


def test_a_wrong_cache_is_caught():
    """Without compaction a tree's accepted nodes stay where they were drafted."""

    class Forgetful(Loop):
        def _commit(self, target, weights, state, draft, scores, verdict):
            return super()._commit(target, weights, state, draft.replace(is_chain=True), scores, verdict)

    sub = subject("feature_tree")
    greedy_tree = dataclasses.replace(sub, eos=())
    loop = Forgetful(sub.graph, sub.drafter, Greedy(2), (), chunk=16)
    requests = contract.random_requests(VOCAB, 6, seed=3)
    base = contract.complete(*greedy_tree.autoregressive(), requests)
    mine = contract.complete(loop, greedy_tree.loop(Greedy)[1], requests)
    assert any(m.accepted[1:].sum() for m in mine)
    assert [b.tokens for b in base] != [m.tokens for m in mine]


def test_nan_logits_name_row_and_position():
    sub = subject("prompt_lookup")
    params = target_params()
    params["embed"]["embedding"] = params["embed"]["embedding"].at[7].set(jnp.nan)
    bad = dataclasses.replace(sub, target=params)
    with pytest.raises(FloatingPointError, match="request 0: .* NaN or infinite at position 2, behind 3 tokens"):
        generate(*bad.loop(Greedy), [Request((1, 7, 3), 5)], context=64, vocab=VOCAB)
