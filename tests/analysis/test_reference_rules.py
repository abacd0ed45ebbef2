"""The reference rules are lossless on tables, exactly, and accept what the papers say."""

from fractions import Fraction

import pytest

from specjax import analysis
from tests.analysis.tables import constant_table, random_table, top_k

RULES = analysis.REFERENCE_RULES
TREES = {
    "chain2": analysis.chain_parents(2),
    "wide": analysis.branching_parents((3,)),
    "binary": analysis.branching_parents((2, 2)),
    "uneven": (-1, -1, 0, 1, 1),
}
COIN_P, COIN_Q = constant_table("1/3", "2/3"), constant_table("2/3", "1/3")


def accepted(rule, target, draws) -> Fraction:
    return analysis.enumerate_step(RULES[rule], target, draws).expected_accepted


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_rule_is_lossless_on_chains(rule, seed):
    target, draft = random_table(f"p{seed}", 3), random_table(f"q{seed}", 3)
    draws = analysis.sampled_draws(draft, analysis.chain_parents(3))
    law = analysis.enumerate_output_law(RULES[rule], target, draws, horizon=4)
    assert law == analysis.target_law(target, 4)


@pytest.mark.parametrize("tree", sorted(TREES))
@pytest.mark.parametrize(
    ("rule", "siblings"),
    [(rule, kind) for rule in ("recursive", "one_hot", "traversal") for kind in ("iid", "without_replacement")]
    + [("k_seq", "iid")],
)
def test_tree_rules_are_lossless(rule, siblings, tree):
    for seed in range(2):
        target, draft = random_table(f"p{seed}", 3), random_table(f"q{seed}", 3)
        draws = analysis.sampled_draws(draft, TREES[tree], siblings)
        law = analysis.enumerate_output_law(RULES[rule], target, draws, horizon=3)
        assert law == analysis.target_law(target, 3)


@pytest.mark.parametrize("rule", ["recursive", "one_hot", "traversal"])
def test_fixed_trees_are_lossless(rule):
    target, draft = random_table("p", 3), random_table("q", 3)
    draws = analysis.fixed_draws(lambda context, rank: ranked(draft(context))[rank], TREES["binary"], 3)
    law = analysis.enumerate_output_law(RULES[rule], target, draws, horizon=3)
    assert law == analysis.target_law(target, 3)


def ranked(law):
    return sorted(range(len(law)), key=lambda x: (-law[x], x))


def test_recursive_with_one_hot_laws_is_the_one_hot_rule():
    """EAGLE's question "why is q = 1?": a chosen child is a draw from a one-hot law."""
    target, draft = random_table("p", 3, positive=True), random_table("q", 3)
    draws = analysis.fixed_draws(lambda context, rank: ranked(draft(context))[rank], TREES["binary"], 3)
    for context in ((), (1,), (2, 0)):
        steps = [analysis.enumerate_step(RULES[rule], target, draws, context) for rule in ("recursive", "one_hot")]
        assert steps[0] == steps[1]


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_an_ensemble_of_drafters_is_lossless(rule):
    members = [random_table(f"member{i}", 3) for i in range(3)]
    target = random_table("p", 3)
    # The three children of the root come from three drafters, and so do the children of the first.
    draws = analysis.sampled_draws([*members, *members[:2]], (-1, -1, -1, 0, 0))
    law = analysis.enumerate_output_law(RULES[rule], target, draws, horizon=2)
    assert law == analysis.target_law(target, 2)


@pytest.mark.parametrize(
    ("gamma", "token", "block"),
    [(1, "2/3", "2/3"), (2, "10/9", "11/9"), (3, "38/27", "5/3"), (4, "130/81", "166/81")],
)
def test_block_verification_toy_by_enumeration(gamma, token, block):
    draws = analysis.sampled_draws(COIN_Q, analysis.chain_parents(gamma))
    assert accepted("speculative", COIN_P, draws) == accepted("recursive", COIN_P, draws) == Fraction(token)
    assert accepted("block", COIN_P, draws) == Fraction(block)
    assert accepted("one_hot", COIN_P, draws) == sum(Fraction(4, 9) ** i for i in range(1, gamma + 1))


def test_block_verification_toy_emits_p_times_p():
    draws = analysis.sampled_draws(COIN_Q, analysis.chain_parents(2))
    law = analysis.enumerate_output_law(RULES["block"], COIN_P, draws, horizon=2)
    assert [law[t] for t in ((0, 0), (0, 1), (1, 0), (1, 1))] == [Fraction(n, 9) for n in (1, 2, 2, 4)]


@pytest.mark.parametrize("seed", range(8))
def test_orders_of_acceptance(seed):
    target, draft = random_table(f"p{seed}", 3), random_table(f"q{seed}", 3)
    chain = analysis.sampled_draws(draft, analysis.chain_parents(3))
    assert accepted("block", target, chain) >= accepted("recursive", target, chain)
    assert accepted("recursive", target, chain) >= accepted("one_hot", target, chain)
    tree = analysis.sampled_draws(draft, TREES["binary"])
    assert accepted("traversal", target, tree) >= accepted("recursive", target, tree)
    siblings = analysis.sampled_draws(draft, TREES["wide"])
    assert accepted("recursive", target, siblings) >= accepted("recursive", target, chain_of_one(draft))


def chain_of_one(draft):
    return analysis.sampled_draws(draft, analysis.chain_parents(1))


def test_on_a_chain_traversal_is_block_and_recursive_is_speculative():
    target, draft = random_table("p", 3), random_table("q", 3)
    for weight, tree in analysis.sampled_draws(draft, analysis.chain_parents(3))(()):
        assert weight > 0
        assert RULES["traversal"](tree, target) == RULES["block"](tree, target)
        assert RULES["recursive"](tree, target) == RULES["speculative"](tree, target)


def test_one_hot_accepts_exactly_sum_pq_of_a_sampled_draft():
    target, draft = random_table("p", 4), random_table("q", 4)
    p, q = target(()), draft(())
    assert accepted("one_hot", target, chain_of_one(draft)) == sum(a * b for a, b in zip(p, q, strict=True))
    assert accepted("recursive", target, chain_of_one(draft)) == sum(map(min, p, q))


def test_one_hot_follows_a_repeated_token_into_the_longer_match():
    tree = analysis.DraftTree((-1, -1, 1), (0, 0, 1), (analysis.one_hot_law(0, 2),) * 3)
    target = constant_table("1/2", "1/2")
    outcomes = RULES["one_hot"](tree, target)
    assert outcomes[analysis.Outcome((1, 2), 0)] == Fraction(1, 8)
    assert outcomes[analysis.Outcome((0,), 0)] == Fraction(1, 4)
    assert outcomes[analysis.Outcome((), 1)] == Fraction(1, 2)


def test_children_without_replacement_cover_the_vocabulary():
    """A full set of distinct children is always accepted, whatever the laws."""
    draws = analysis.sampled_draws(random_table("q", 3, positive=True), TREES["wide"], "without_replacement")
    for rule in ("recursive", "one_hot", "traversal"):
        assert accepted(rule, random_table("p", 3), draws) == 1


def test_nodes_beyond_the_support_are_missing():
    draft = constant_table("1/2", "1/2", "0")
    drafts = list(analysis.sampled_draws(draft, (-1, -1, -1, 2, 1), "without_replacement")(()))
    assert {tree.parents for _, tree in drafts} == {(-1, -1, 1)}
    assert sum(weight for weight, _ in drafts) == 1


def test_k_seq_with_one_child_is_speculative_sampling():
    target, draft = random_table("p", 3), random_table("q", 3)
    draws = analysis.sampled_draws(draft, analysis.chain_parents(2))
    assert accepted("k_seq", target, draws) == accepted("speculative", target, draws)


def test_k_seq_rho_solves_its_equation():
    p, q = random_table("p", 4, positive=True)(()), random_table("q", 4, positive=True)(())
    for k in (2, 3, 4):
        rho = analysis.k_seq_rho(p, q, k)
        beta = sum(min(b, a / rho) for a, b in zip(p, q, strict=True))
        assert 1 <= rho <= k
        assert 0 <= rho * beta - (1 - (1 - beta) ** k) < Fraction(1, 2**18)
        # The acceptance it gives: 1 - (1 - beta)^k, at least (1 - 1/e) of the k-fold overlap's bound.
        draws = analysis.sampled_draws(lambda context: q, (-1,) * k)
        assert accepted("k_seq", lambda context: p, draws) == 1 - (1 - beta) ** k
        assert 1 - (1 - beta) ** k >= Fraction(632, 1000) * sum(min(a, k * b) for a, b in zip(p, q, strict=True))


def test_a_step_longer_than_the_horizon_is_cut():
    target, draft = random_table("p", 2), random_table("q", 2)
    draws = analysis.sampled_draws(draft, analysis.chain_parents(4))
    assert analysis.enumerate_output_law(RULES["block"], target, draws, 2) == analysis.target_law(target, 2)


def test_warped_laws_are_laws_too():
    """Target and draft under different top-k: lossless against the warped target."""
    base_p, base_q = random_table("p", 4, positive=True), random_table("q", 4, positive=True)
    target, draft = (lambda c: top_k(base_p(c), 2)), (lambda c: top_k(base_q(c), 3))
    draws = analysis.sampled_draws(draft, analysis.chain_parents(2))
    for rule in ("speculative", "block"):
        law = analysis.enumerate_output_law(RULES[rule], target, draws, 3)
        assert law == analysis.target_law(target, 3)


def test_law_vector_orders_cells_as_sequence_counts_does():
    law = {(0, 1): Fraction(1, 4), (1, 0): Fraction(3, 4)}
    vector = analysis.law_vector(law, vocab_size=2, horizon=2)
    assert vector == [0, 0.25, 0.75, 0]
    assert analysis.sequence_counts([[0, 1], [1, 0], [1, 0], [1, 0]], 2).tolist() == [0, 1, 3, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t, d: analysis.sampled_draws(d, (0,)), "node 0 has parent 0"),
        (lambda t, d: analysis.sampled_draws(d, (-1,), "sorted"), "siblings is 'sorted'"),
        (lambda t, d: analysis.sampled_draws([d], (-1, -1)), "1 draft laws for 2 nodes"),
        (lambda t, d: list(analysis.sampled_draws(d, (-1,) * 4, max_drafts=10)(())), "max_drafts=10"),
        (lambda t, d: list(analysis.sampled_draws(lambda c: (0.5, 0.5), (-1,))(())), "draft law after"),
        (lambda t, d: run("block", t, analysis.sampled_draws(d, (-1, -1))), "verifies chains"),
        (lambda t, d: run("k_seq", t, analysis.sampled_draws(d, (-1, -1), "without_replacement")), "iid"),
        (lambda t, d: run("block", lambda c: (Fraction(1, 2),), chain_of_one(d)), "target law after"),
        (lambda t, d: run("block", t, chain_of_one(d), horizon=0), "horizon is 0"),
        (lambda t, d: run("block", t, lambda c: list(chain_of_one(d)(c))[:1]), "expected 1"),
    ],
)
def test_bad_input_gets_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call(random_table("p", 3, positive=True), random_table("q", 3, positive=True))


def run(rule, target, draws, horizon=2):
    return analysis.enumerate_output_law(RULES[rule], target, draws, horizon)
