"""Ensembles: the contract, the law of whole decodes, planted faults, what members keep, and what does not fit."""

from __future__ import annotations

import dataclasses
import functools
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding
from specjax.build import Drafting, make_drafter
from specjax.decoding import Request, draft_passes, make_sampling
from specjax.decoding.tree import from_branching
from specjax.drafting import Adaptive, DraftModel, Jacobi, Kangaroo, OtherTokenizer, PromptLookup, Recycling
from specjax.drafting.ensemble import (
    EnsembleMixture,
    EnsembleProxy,
    EnsembleUnion,
    EnsembleVote,
    Members,
    acceptance_by_share,
    assemble,
    proxy,
)
from specjax.drafting.ensemble.members import Stack
from specjax.drafting.ensemble.proxy import root_overlaps
from specjax.drafting.ensemble.union import join
from specjax.models import ModelConfig, RopeConfig, causal_view, graph, init_cache, init_decoder, merge
from specjax.models.kangaroo import kangaroo_config
from specjax.testing import contract, tiny_target
from specjax.testing.markov import markov_config, markov_graph, markov_params, random_law
from specjax.verification import OneHot, Recursive
from tests.contract.stubs import FeatureTree, JacobiWindow
from tests.drafting import common

VOCAB = 13
MAKERS = {
    "union": EnsembleUnion,
    "vote": functools.partial(EnsembleVote, num_nodes=3),
    "vote_on_runs": functools.partial(EnsembleVote, num_nodes=4, run=2),
    "mixture": functools.partial(EnsembleMixture, num_nodes=3),
    "learned_mixture": functools.partial(EnsembleMixture, num_nodes=3, learning_rate=0.5),
    "early_exit_proxy": functools.partial(EnsembleProxy, num_nodes=3, proxy="early_exit", layer=0),
    "oracle": functools.partial(EnsembleProxy, num_nodes=3, proxy="oracle"),
    "calibrated_proxy": functools.partial(EnsembleProxy, num_nodes=3, proxy="calibration"),
    "random_proxy": functools.partial(EnsembleProxy, num_nodes=3, proxy="random"),
}


def methods(*quick: str) -> list[Any]:
    """All, those that are not named as slow tests."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in MAKERS]


def config() -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=VOCAB,
        head_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_position=1 << 14,
        norm_eps=1e-5,
        query_scale=8**-0.5,
        windows=(None,),
        ropes=(RopeConfig(),),
        tie_embeddings=True,
    )


@functools.cache
def target() -> tuple[Any, Any]:
    params = jax.tree.map(lambda x: 2.5 * x if x.ndim > 1 else x, init_decoder(config(), jax.random.key(0)))
    return graph(config())[0], params


@functools.cache
def noisy(seed: int) -> Any:
    """The target's parameters, disturbed: a draft that is often right."""
    leaves, structure = jax.tree.flatten(target()[1])
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noise = [x + 0.15 * jnp.std(x) * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, noise)


def subject(name: str, *, stacked: bool = True) -> contract.Subject:
    """Two draft models, run as one, and prompt lookup."""
    draft = DraftModel(config(), num_nodes=3)
    drafters = [draft, draft, PromptLookup(num_nodes=3)]
    members, params, tables = assemble(drafters, [noisy(1), noisy(2), {}], [{}, {}, {}], stacked=stacked)
    drafter = MAKERS[name](members)
    return contract.Subject(*target(), drafter, params, drafter.tables(tables), eos=(2, 5))


def accepted(done: list[Any]) -> float:
    steps = sum(c.accepted.sum() for c in done)
    return sum(c.emitted for c in done) / steps


@pytest.mark.parametrize("name", methods("vote"))
def test_contract(name: str) -> None:
    sub = subject(name)
    contract.check_drafter(sub, OneHot if sub.drafter.kind(make_sampling([1.0])) == "fixed" else Recursive)


@pytest.mark.parametrize("name", methods("union", "mixture", "early_exit_proxy"))
def test_greedy_equality(name: str) -> None:
    requests = contract.random_requests(VOCAB, 3, seed=4)
    done = contract.check_equals_autoregressive(dataclasses.replace(subject(name), eos=()), Recursive, requests)
    assert accepted(done) > 1.5


@pytest.mark.parametrize("name", methods("union"))
def test_stacked_members_draft_what_they_draft_apart(name: str) -> None:
    requests = contract.random_requests(VOCAB, 3, seed=5, temperature=1.0)
    together, apart = [subject(name, stacked=s) for s in (True, False)]
    assert len(together.drafter.members.entries) == 2 and len(apart.drafter.members.entries) == 3
    one, other = (contract.complete(*s.loop(Recursive), requests) for s in (together, apart))
    assert [c.tokens for c in one] == [c.tokens for c in other]
    assert [c.accepted.tolist() for c in one] == [c.accepted.tolist() for c in other]


# ---- The law ----


def markov_ensemble(make: Any, seeds: tuple[int, int] = (7, 8)) -> tuple[Any, Any, Any]:
    """Two draft models and prompt lookup, for the four-token Markov target."""
    draft = DraftModel(markov_config(4), num_nodes=2)
    params = [markov_params(random_law(4, seed, sharpness=1.0)) for seed in seeds]
    members, own, tables = assemble([draft, draft, PromptLookup(num_nodes=2)], [*params, {}], [{}, {}, {}])
    drafter = make(members)
    return drafter, own, drafter.tables(tables)


@pytest.mark.parametrize("name", methods())
def test_fresh_parameters_have_the_members_shapes(name: str) -> None:
    drafter, params, tables = markov_ensemble(LAW_MAKERS[name])
    network = merge(markov_graph(4), markov_params(random_law(4, 0)))
    fresh = jax.eval_shape(lambda: drafter.init_params(jax.random.key(0), network))
    assert jax.tree.structure(fresh) == jax.tree.structure((params, tables))
    assert [x.shape for x in jax.tree.leaves(fresh)] == [x.shape for x in jax.tree.leaves((params, tables))]


LAW_MAKERS = MAKERS | {
    "vote": functools.partial(EnsembleVote, num_nodes=2),
    "vote_on_runs": functools.partial(EnsembleVote, num_nodes=2, run=2),
    "mixture": functools.partial(EnsembleMixture, num_nodes=2),
    "learned_mixture": functools.partial(EnsembleMixture, num_nodes=2, learning_rate=0.5),
    # The Markov target is its own embedding and head: layer 0 is a perfect proxy, the hardest choice.
    "early_exit_proxy": functools.partial(EnsembleProxy, num_nodes=2, proxy="early_exit", layer=0),
    "oracle": functools.partial(EnsembleProxy, num_nodes=2, proxy="oracle"),
    "calibrated_proxy": functools.partial(EnsembleProxy, num_nodes=2, proxy="calibration"),
    "random_proxy": functools.partial(EnsembleProxy, num_nodes=2, proxy="random"),
}


@pytest.mark.parametrize("name", methods("union"))
def test_law_of_whole_decodes(name: str) -> None:
    made = markov_ensemble(LAW_MAKERS[name])
    assert contract.law_p_value(*made, Recursive, draws=1 << 12) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Recursive, OneHot])
@pytest.mark.parametrize("name", MAKERS)
def test_law_on_more_draws(name: str, rule: Any) -> None:
    """`experiments.exactness` takes a million."""
    made = markov_ensemble(LAW_MAKERS[name])
    assert contract.law_p_value(*made, rule, draws=1 << 16) > 1e-6


def liked_tokens(*args: Any) -> Any:
    """The planted fault: the drawn tokens' own probabilities, where those of their laws are asked for."""
    target, stop, cache, drafts, context = args
    fixed = [dataclasses.replace(d, law=jnp.full_like(d.law, -1), laws=d.laws[:, :0]) for d in drafts]
    return root_overlaps(target, stop, cache, fixed, context)


def test_a_member_chosen_by_its_tokens_but_verified_with_its_law_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    make = functools.partial(EnsembleProxy, num_nodes=2, proxy="early_exit", layer=0)
    monkeypatch.setattr(proxy, "root_overlaps", liked_tokens)
    jax.clear_caches()
    try:
        assert contract.law_p_value(*markov_ensemble(make), Recursive, draws=1 << 12) < 1e-6
    finally:
        jax.clear_caches()


def first_acceptance(drafter: Any, params: Any, tables: Any, tokens: int = 12) -> float:
    """How often the Markov target accepts a first draft token, at temperature 1."""
    sub = contract.Subject(markov_graph(4), markov_params(random_law(4, 0)), drafter, params, tables)
    loop, weights = sub.loop(Recursive)
    requests = [Request((0, 1), tokens, temperature=1.0, id=i) for i in range(512)]
    state = loop.run(weights, decoding.prefill(loop, weights, requests, context=64, seed=0), 1 << 30)
    counts = np.asarray(state.statistics.accepted).sum(0)
    return float(1 - counts[0] / counts.sum())


@pytest.mark.parametrize("name", ["oracle", pytest.param("early_exit_proxy", marks=pytest.mark.slow)])
def test_the_proxy_takes_the_member_whose_law_is_nearest(name: str) -> None:
    """Layer 0 of a Markov target is the target: both know its law, and are accepted more often than either member."""
    draft = DraftModel(markov_config(4), num_nodes=2)
    alone = [first_acceptance(draft, markov_params(random_law(4, seed, sharpness=1.0)), {}) for seed in (7, 8)]
    assert first_acceptance(*markov_ensemble(LAW_MAKERS[name])) > max(alone) + 0.03


def test_the_calibration_finds_the_member_that_is_right_at_temperature_1() -> None:
    """Though the text that the other wrote is never what it would have drawn."""
    draft = DraftModel(markov_config(4), num_nodes=2)
    params = [markov_params(random_law(4, 7, sharpness=1.0)), markov_params(random_law(4, 0))]
    members, own, tables = assemble([draft, draft], params, [{}, {}])
    drafter = EnsembleProxy(members, num_nodes=2, proxy="calibration")
    assert first_acceptance(drafter, own, drafter.tables(tables), tokens=48) > 0.93


class OneUniformForAll(Members):
    """The planted fault of shared randomness: all members draw with the same keys."""

    def propose(self, *args: Any) -> Any:
        import specjax.drafting.ensemble.members as module

        own, module.fold = module.fold, lambda keys, index: keys
        try:
            return super().propose(*args)
        finally:
            module.fold = own


@pytest.mark.slow
def test_members_that_draw_with_the_same_keys_are_caught() -> None:
    # Alike, so that the second always draws what the first drew: the coupling of different laws is hardly seen.
    same = functools.partial(markov_ensemble, seeds=(7, 7))
    assert contract.law_p_value(*same(EnsembleUnion), Recursive, draws=1 << 14) > 1e-6
    faulty = same(lambda members: EnsembleUnion(OneUniformForAll(members.entries)))
    assert contract.law_p_value(*faulty, Recursive, draws=1 << 16) < 1e-6


# ---- What members keep ----


@pytest.mark.parametrize(
    "make",
    [
        EnsembleUnion,
        pytest.param(functools.partial(EnsembleProxy, num_nodes=4), marks=pytest.mark.slow),
        pytest.param(functools.partial(EnsembleVote, num_nodes=4, run=4), marks=pytest.mark.slow),
    ],
    ids=["union", "proxy", "vote_on_runs"],
)
def test_a_draft_model_reads_what_was_accepted_of_others(make: Any) -> None:
    """The cache of a member that is seldom right is that of a fresh pass over the text that the other one wrote."""
    draft = DraftModel(config(), num_nodes=4)
    bad = init_decoder(config(), jax.random.key(9))
    members, params, tables = assemble([draft, draft], [target()[1], bad], [{}, {}], stacked=False)
    drafter = make(members)
    sub = contract.Subject(*target(), drafter, params, drafter.tables(tables))
    loop, weights = sub.loop(Recursive)
    requests = [dataclasses.replace(r, max_new_tokens=60) for r in contract.random_requests(VOCAB, 3, seed=2)]
    state = decoding.prefill(loop, weights, requests, context=contract.CONTEXT, seed=0, buffer=contract.BUFFER)
    state = loop.run(weights, state, jnp.int32(4))
    held = np.array(state.length)  # the next step begins with the token before
    state = loop.run(weights, state, jnp.int32(1))
    assert (np.array(state.statistics.accepted)[:, 4] > 2).all(), "the other member was meant to be right"
    states = state.drafter if make is EnsembleUnion else state.drafter.members
    tokens, start = state.tokens[:, : int(held.max())], jnp.zeros(3, jnp.int32)
    _, fresh = merge(graph(config())[0], bad).cached(
        tokens, init_cache(config(), 3, contract.BUFFER), causal_view(start, tokens.shape[1])
    )
    for row, n in enumerate(held):
        for name in ("k", "v"):
            mine, theirs = (np.asarray(getattr(c.layers[0], name))[row, :n] for c in (states[1].cache, fresh))
            np.testing.assert_allclose(mine, theirs, atol=1e-4)


def test_members_that_keep_their_own_paths_are_refused() -> None:
    lookup, draft = PromptLookup(num_nodes=3), DraftModel(config(), num_nodes=3)
    kangaroo = Kangaroo(kangaroo_config(common.config(2), 1), 3)
    with pytest.raises(ValueError, match="member Kangaroo, whose adapter's cache holds its own draft"):
        Members((lookup, kangaroo))
    with pytest.raises(ValueError, match="member Adaptive, over DraftModel, whose state would miss"):
        Members((lookup, Adaptive(draft, (0, 3))))
    with pytest.raises(ValueError, match="member EnsembleMixture, an ensemble around DraftModel"):
        Members((lookup, EnsembleMixture(Members((lookup, draft)))))
    Members((lookup, Adaptive(lookup, (0, 3)), EnsembleMixture(Members((lookup, lookup)))))


def test_votes_are_counted_by_the_share_that_agreed() -> None:
    """Along one request, against a count by hand from its steps."""
    sub = dataclasses.replace(subject("vote"), eos=())
    loop, weights = sub.loop(OneHot)
    request = contract.random_requests(VOCAB, 3, seed=6)[0]
    request = dataclasses.replace(request, max_new_tokens=40)
    state = decoding.prefill(loop, weights, [request], context=contract.CONTEXT, seed=0, buffer=contract.BUFFER)
    verified, accepted, agreed = 0, 0, 0
    while not bool(state.done[0]):
        before = np.asarray(state.statistics.accepted[0])
        state = loop.step(weights, state)
        count = int(np.argmax(np.asarray(state.statistics.accepted[0]) - before))
        verified += min(count + 1, loop.drafter.num_nodes)
        accepted += count
        agreed += int(state.drafter.agreeing[0, 0])
    shares = acceptance_by_share(state.drafter.outcomes)
    told = loop.drafter.observed(state.drafter)["by_agreement"]
    assert {Fraction(share): tuple(counts) for share, counts in told.items()} == shares
    # The last step may have verified tokens that the budget then cut.
    assert sum(v for v, _ in shares.values()) in range(verified, verified + 3)
    assert sum(a for _, a in shares.values()) in range(accepted, accepted + 4)
    assert set(shares) <= {Fraction(a, n) for n in (1, 2, 3) for a in range(1, n + 1)} and agreed


def test_kinds() -> None:
    warm, cold = make_sampling([1.0]), make_sampling([0.0])
    found = {name: subject(name).drafter.kind(warm) for name in MAKERS}
    assert found == {
        "union": "mixed",
        "vote": "fixed",
        "vote_on_runs": "fixed",
        "mixture": "iid",
        "learned_mixture": "iid",
        "early_exit_proxy": "mixed",
        "oracle": "mixed",
        "calibrated_proxy": "mixed",
        "random_proxy": "mixed",
    }
    assert {subject(name).drafter.kind(cold) for name in MAKERS} == {"fixed"}


def test_a_tree_of_choices_goes_with_one_drawn_in_any_way() -> None:
    """Only siblings that were drawn have a way in which they were."""
    tree, tokens = from_branching((2,)), jnp.asarray([[3, 1]])
    laws = jnp.log(jnp.full((1, 1, 4), 0.25))
    drawn = tree.draft(tokens, law=jnp.zeros((1, 2), jnp.int32), laws=laws, siblings="without_replacement")
    for drafts in ([drawn, tree.draft(tokens)], [tree.draft(tokens), drawn]):
        both = join(drafts)
        assert both.siblings == "without_replacement" and sorted(both.law[0].tolist()) == [-1, -1, 0, 0]
    with pytest.raises(ValueError, match="siblings drawn iid and without_replacement"):
        join([drawn, dataclasses.replace(drawn, siblings="iid")])


# ---- What does not fit ----


def test_one_member_is_no_ensemble() -> None:
    with pytest.raises(ValueError, match="ensemble of 1; expected at least 2"):
        Members((PromptLookup(),))


def test_members_with_probes_are_refused() -> None:
    with pytest.raises(ValueError, match="JacobiWindow sends 4 probes"):
        Members((PromptLookup(), JacobiWindow()))


def test_members_that_need_taps_cannot_vote() -> None:
    with pytest.raises(ValueError, match=r"FeatureTree reads the target's activations .* use ensemble_union"):
        EnsembleVote(Members((PromptLookup(), FeatureTree())))


def test_members_that_cannot_continue_from_a_vote_are_refused() -> None:
    lookup, other = PromptLookup(num_nodes=2), OtherTokenizer(config(), num_nodes=2)
    for make, member in ((EnsembleVote, other), (EnsembleMixture, other)):
        with pytest.raises(ValueError, match=f"member {type(member).__name__} keeps a state that follows"):
            make(Members((lookup, member)))
    EnsembleVote(Members((lookup, Recycling(num_nodes=2), DraftModel(config()))))
    EnsembleUnion(Members((lookup, other)))


def test_jacobi_is_no_member() -> None:
    """In a tree of several drafts its block lies elsewhere."""
    with pytest.raises(ValueError, match="member Jacobi, whose next guesses are what the target says at the places"):
        Members((PromptLookup(num_nodes=2), Jacobi(num_nodes=2)))


def test_members_that_need_taps_have_the_ensembles_depth() -> None:
    EnsembleUnion(Members((PromptLookup(num_nodes=2), FeatureTree())))
    with pytest.raises(ValueError, match="FeatureTree reads the target's activations along at most 2 tokens.* 3 deep"):
        EnsembleUnion(Members((PromptLookup(num_nodes=3), FeatureTree())))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: EnsembleVote(m, num_nodes=3, run=2), "num_nodes=3, run=2"),
        (lambda m: EnsembleMixture(m, num_nodes=0), "num_nodes=0"),
        (lambda m: EnsembleProxy(m, proxy="best"), "proxy='best'; expected early_exit, oracle, calibration, random"),
        (lambda m: EnsembleProxy(m, step_size=0.0), "step_size=0.0"),
    ],
)
def test_options_out_of_range(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(Members((PromptLookup(), PromptLookup())))


@pytest.mark.parametrize(
    ("weights", "message"),
    [((0.0, 0.0), "expected numbers >= 0, at least one"), ((1.0,), "for 2 members"), ((1.0, -1.0), "numbers >= 0")],
)
def test_weights_that_make_no_mean(weights: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EnsembleMixture(Members((PromptLookup(), PromptLookup()))).tables(({}, {}), weights=weights)


def test_makers_name_the_member_that_does_not_fit() -> None:
    target = tiny_target(width=16, layers=1)
    lookup = {"name": "prompt_lookup", "num_nodes": 2}
    union = make_drafter("ensemble_union", target, members=[lookup, lookup])
    assert (union.drafter.num_nodes, union.drafter.depth, union.param_bytes) == (4, 2, 0)
    vote = make_drafter("ensemble_vote", target, members=[lookup, lookup], num_nodes=4, run=2, accuracy=(0.2, 0.4))
    assert vote.tables["accuracy"].tolist() == pytest.approx([0.2, 0.4])
    with pytest.raises(ValueError, match="member 1 of the ensemble is drafter 'lookup'; known: .*prompt_lookup"):
        make_drafter("ensemble_union", target, members=[lookup, {"name": "lookup"}])
    with pytest.raises(ValueError, match="member 0 of the ensemble, drafter 'prompt_lookup': num_nodes=0"):
        make_drafter("ensemble_union", target, members=[{**lookup, "num_nodes": 0}, lookup])
    with pytest.raises(ValueError, match="does not take these options"):
        make_drafter("ensemble_union", target, members=[lookup, lookup], weights=(1, 1))
    missing = {"name": "draft_model", "source": "runs/never"}
    with pytest.raises(ValueError, match="member 1 of the ensemble, drafter 'draft_model': .*runs/never"):
        make_drafter("ensemble_union", target, members=[lookup, missing])
    # A share above 1 would outweigh a whole vote.
    for name, option in (("ensemble_vote", "accuracy"), ("ensemble_proxy", "worth")):
        with pytest.raises(ValueError, match=rf"{option}=\(0.5, 3.0\); expected shares: numbers of at most 1"):
            make_drafter(name, target, members=[lookup, lookup], **{option: (0.5, 3.0)})


def test_bytes_of_every_member_count() -> None:
    draft = DraftModel(config(), num_nodes=2)
    own = init_decoder(config(), jax.random.key(0))
    alone = Drafting("draft_model", draft, own, {}).param_bytes
    members, params, tables = assemble([draft, draft], [own, own], [{}, {}])
    assert Drafting("ensemble_union", EnsembleUnion(members), params, tables).param_bytes == 2 * alone


def test_draft_passes_are_those_of_all_members():
    """Two draft models of one config, which run stacked, and a lookup; each passes once a token."""
    members = Members((Stack(DraftModel(config(), num_nodes=3), 2), PromptLookup(num_nodes=3)))
    passes = {name: draft_passes(make(members)) for name, make in MAKERS.items()}
    assert passes["union"] == passes["random_proxy"] == passes["calibrated_proxy"] == 3 + 3 + 1
    assert passes["early_exit_proxy"] == 3 + 3 + 1 + 1
    assert passes["mixture"] == passes["vote"] == 3 * (1 + 1 + 1)
    assert passes["vote_on_runs"] == 2 * (2 + 2 + 1)
