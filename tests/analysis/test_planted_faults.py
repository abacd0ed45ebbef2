"""Mistakes that verification code makes in public, planted in a reference rule or draft: the law differs.

A fault is a change to what the drafts yield or to the rule. Beside each stands the healthy version, which is
exact on the very same tables, and for faults of the draft the one-hot rule, which stays exact whatever the
draft says about itself.
"""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest

from specjax import analysis
from tests.analysis.tables import random_table, top_k

V = 3
RULES = analysis.REFERENCE_RULES
# Sharp laws: on flat ones several of these faults move the law by less than a test could see.
P, Q = (random_table(f"{name}0", V, positive=True, sharpness=2) for name in ("target", "draft"))
CHAIN, SIBLINGS = analysis.chain_parents(2), (-1, -1)
# What a G-test of a million draws is asked to see.
VISIBLE = Fraction(1, 100)


def tv_from_target(rule, draws, target=P, horizon=3) -> Fraction:
    law = analysis.enumerate_output_law(rule, target, draws, horizon)
    return analysis.total_variation(law, analysis.target_law(target, horizon))


def tv_of_one_step(rule_after, draws, target, context) -> Fraction:
    """Deviation of the next two tokens: a step by `rule_after(context)`, the target where that emits one."""
    law: dict = {}
    for tokens, mass in analysis.enumerate_step(rule_after(context), target, draws, context).emitted.items():
        tails = {(): Fraction(1)} if len(tokens) >= 2 else {(x,): m for x, m in enumerate(target((*context, *tokens)))}
        for tail, chance in tails.items():
            key = (*tokens, *tail)[:2]
            law[key] = law.get(key, 0) + mass * chance
    return analysis.total_variation(law, analysis.target_law(lambda suffix: target((*context, *suffix)), 2))


CONTEXTS = ((), (0,), (1,), (2, 1))


def edited(draws, edit: Callable):
    """Drafts changed after they were drawn; `edit` sees the context and one draft."""
    return lambda context: ((weight, edit(context, tree)) for weight, tree in draws(context))


def warped(context):
    return top_k(Q(context), 2)


def suffix_to(tree, node):
    """Tokens from the root down to `node`."""
    tokens = ()
    while node >= 0:
        tokens, node = (tree.tokens[node], *tokens), tree.parents[node]
    return tokens


def scored_with(law_fn):
    """Replaces the recorded laws by those of `law_fn`."""

    def edit(context, tree):
        return replace(tree, laws=tuple(law_fn(context + suffix_to(tree, parent)) for parent in tree.parents))

    return edit


def reordered(tree, order):
    """A draft of siblings only, in another order, perhaps fewer."""
    return analysis.DraftTree(
        (-1,) * len(order), tuple(tree.tokens[i] for i in order), tuple(tree.laws[i] for i in order)
    )


def sorted_by_own_q(context, tree):
    return reordered(tree, sorted(range(len(tree.tokens)), key=lambda i: -tree.laws[i][tree.tokens[i]]))


def best_two_by_own_q(context, tree):
    return reordered(sorted_by_own_q(context, tree), (0, 1))


def without_unlikely_tokens(context, tree):
    """Stops the chain before the first drawn token whose own q is low."""
    keep = 0
    while keep < len(tree.tokens) and tree.laws[keep][tree.tokens[keep]] >= Fraction(2, 5):
        keep += 1
    return analysis.DraftTree(tree.parents[:keep], tree.tokens[:keep], tree.laws[:keep])


def stopped_after_unlikely_token(context, tree):
    """Healthy twin: keeps the drawn token and stops after it."""
    keep = without_unlikely_tokens(context, tree)
    n = min(len(keep.tokens) + 1, len(tree.tokens))
    return analysis.DraftTree(tree.parents[:n], tree.tokens[:n], tree.laws[:n])


def more_confident_member(context, tree):
    """Of two members' drawn tokens, the one to which its own member gives more."""
    best = max(range(2), key=lambda i: tree.laws[i][tree.tokens[i]])
    return reordered(tree, (best,))


def soft_argmax(context, tree):
    return replace(tree, laws=tuple(Q(context + suffix_to(tree, parent)) for parent in tree.parents))


ARGMAX = analysis.fixed_draws(lambda context, rank: max(range(V), key=lambda x: (Q(context)[x], -x)), CHAIN, V)
PERMUTATION = (2, 0, 1)


def mapped_to_target_ids(context, tree):
    """Draft ids to target ids, tokens only: the laws keep draft order."""
    return replace(tree, tokens=tuple(PERMUTATION[t] for t in tree.tokens))


def mapped_with_laws(context, tree):
    laws = tuple(tuple(law[PERMUTATION.index(x)] for x in range(V)) for law in tree.laws)
    return replace(mapped_to_target_ids(context, tree), laws=laws)


MEMBERS = [Q, random_table("second0", V, positive=True, sharpness=2)]
sampled = analysis.sampled_draws

# name: (drafts with the fault, the healthy drafts, rule)
DRAFT_FAULTS = {
    "raw q for a warped draw": (
        edited(sampled(warped, CHAIN), scored_with(Q)),
        sampled(warped, CHAIN),
        "speculative",
    ),
    "raw q for a warped draw, block": (
        edited(sampled(warped, CHAIN), scored_with(Q)),
        sampled(warped, CHAIN),
        "block",
    ),
    "argmax child with a soft q": (edited(ARGMAX, soft_argmax), ARGMAX, "recursive"),
    "without replacement, scored unconditionally": (
        edited(sampled(Q, SIBLINGS, "without_replacement"), scored_with(Q)),
        sampled(Q, SIBLINGS, "without_replacement"),
        "recursive",
    ),
    "without replacement, scored unconditionally, traversal": (
        edited(sampled(Q, SIBLINGS, "without_replacement"), scored_with(Q)),
        sampled(Q, SIBLINGS, "without_replacement"),
        "traversal",
    ),
    "sampled siblings sorted by their own q": (
        edited(sampled(Q, SIBLINGS), sorted_by_own_q),
        sampled(Q, SIBLINGS),
        "recursive",
    ),
    "sampled token dropped because its own q is low": (
        edited(sampled(Q, CHAIN), without_unlikely_tokens),
        edited(sampled(Q, CHAIN), stopped_after_unlikely_token),
        "speculative",
    ),
    "sampled nodes pruned by a re-rank": (
        edited(sampled(Q, (-1, -1, -1)), best_two_by_own_q),
        sampled(Q, (-1, -1, -1)),
        "recursive",
    ),
    "ensemble member chosen by its tokens": (
        edited(sampled(MEMBERS, SIBLINGS), more_confident_member),
        sampled(MEMBERS, SIBLINGS),
        "recursive",
    ),
    "d2t applied to tokens but not to q": (
        edited(sampled(Q, CHAIN), mapped_to_target_ids),
        edited(sampled(Q, CHAIN), mapped_with_laws),
        "speculative",
    ),
}


@pytest.mark.parametrize("name", DRAFT_FAULTS)
def test_a_draft_that_misstates_its_law_is_seen(name):
    faulty, healthy, rule = DRAFT_FAULTS[name]
    assert tv_from_target(RULES[rule], healthy) == 0
    assert tv_from_target(RULES[rule], faulty) > VISIBLE


@pytest.mark.parametrize("name", DRAFT_FAULTS)
def test_the_one_hot_rule_is_exact_whatever_the_draft_says(name):
    faulty, _, _ = DRAFT_FAULTS[name]
    assert tv_from_target(RULES["one_hot"], faulty) == 0


# --- Faults of the rule --------------------------------------------------------------------------------


def accept_chance(p_x, q_x):
    return min(Fraction(1), p_x / q_x)


def emit(outcomes, path, law, mass):
    for token, chance in enumerate(law):
        if mass * chance:
            outcome = analysis.Outcome(path, token)
            outcomes[outcome] = outcomes.get(outcome, 0) + mass * chance
    return outcomes


def siblings_rule(next_target, final_law):
    """Recursive rejection of siblings with its two updates given: after a failure, and for the last draw."""

    def rule(draft, target):
        outcomes, mass, p = {}, Fraction(1), target(())
        for node, (token, q) in enumerate(zip(draft.tokens, draft.laws, strict=True)):
            accept = accept_chance(p[token], q[token])
            emit(outcomes, (node,), target((token,)), mass * accept)
            mass *= 1 - accept
            p = next_target(p, q)
        return emit(outcomes, (), final_law(p) if sum(p) else target(()), mass)

    return rule


def unnormalised(p, q):
    return tuple(max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True))


def leftover_to_last(p):
    """A draw by inverse CDF from weights that fall short of one ends at the last token."""
    return (*p[:-1], 1 - sum(p[:-1]))


def normalised(p):
    return tuple(x / sum(p) for x in p) if sum(p) else p


def chain_rule(residual_of=lambda p, q, context: analysis.residual(p, q), bonus_row=lambda gamma: gamma):
    """Leviathan's rule with its residual and the row of its bonus given."""

    def rule(draft, target):
        outcomes, mass, gamma = {}, Fraction(1), len(draft.tokens)
        for i, (token, q) in enumerate(zip(draft.tokens, draft.laws, strict=True)):
            p = target(draft.tokens[:i])
            accept = accept_chance(p[token], q[token])
            emit(outcomes, tuple(range(i)), residual_of(p, q, draft.tokens[:i]), mass * (1 - accept))
            mass *= accept
        return emit(outcomes, tuple(range(gamma)), target(draft.tokens[: bonus_row(gamma)]), mass)

    return rule


def test_residual_not_renormalised_between_siblings():
    draws = sampled(Q, SIBLINGS)
    assert tv_from_target(siblings_rule(analysis.residual, lambda p: p), draws) == 0
    assert tv_from_target(siblings_rule(unnormalised, normalised), draws) > VISIBLE


def test_residual_not_renormalised_before_the_last_draw():
    draws = sampled(Q, (-1,))
    assert tv_from_target(siblings_rule(unnormalised, normalised), draws) == 0
    assert tv_from_target(siblings_rule(unnormalised, leftover_to_last), draws) > VISIBLE


def test_q_updated_between_iid_siblings():
    """Taking the failed token out of an iid sibling's q, as if drawn without replacement."""

    def rule(draft, target):
        token, q = draft.tokens[0], draft.laws[0]
        struck = normalised(tuple(Fraction(0) if x == token else w for x, w in enumerate(q)))
        return RULES["recursive"](replace(draft, laws=(q, struck)), target)

    assert tv_from_target(RULES["recursive"], sampled(Q, SIBLINGS)) == 0
    assert tv_from_target(rule, sampled(Q, SIBLINGS)) > VISIBLE


def test_residual_from_raw_p():
    def target(context):
        return top_k(P(context), 2)

    def from_raw(context):
        return chain_rule(lambda p, q, suffix: analysis.residual(P((*context, *suffix)), q))

    draws = sampled(Q, CHAIN)
    assert max(tv_of_one_step(lambda context: chain_rule(), draws, target, c) for c in CONTEXTS) == 0
    assert max(tv_of_one_step(from_raw, draws, target, c) for c in CONTEXTS) > VISIBLE


def test_bonus_from_the_wrong_row():
    draws = sampled(Q, CHAIN)
    assert tv_from_target(chain_rule(), draws) == 0
    assert tv_from_target(chain_rule(bonus_row=lambda gamma: gamma - 1), draws) > VISIBLE


def test_residual_from_the_wrong_row():
    draws = sampled(Q, CHAIN)

    def previous_row(draft, target):
        shifted = lambda p, q, suffix: analysis.residual(target(suffix[:-1]), q)  # noqa: E731
        return chain_rule(shifted)(draft, target)

    assert tv_from_target(previous_row, draws) > VISIBLE


def test_block_verification_that_stops_at_the_first_failure():
    def rule(draft, target):
        gamma, p_bar, mass, outcomes = len(draft.tokens), Fraction(1), Fraction(1), {}
        for i, (token, q) in enumerate(zip(draft.tokens, draft.laws, strict=True)):
            p = target(draft.tokens[:i])
            left = tuple(max(p_bar * a - b, Fraction(0)) for a, b in zip(p, q, strict=True))
            p_bar = min(p_bar * p[token] / q[token], Fraction(1))
            emit(outcomes, tuple(range(i)), normalised(left) if sum(left) else p, mass * (1 - p_bar))
            mass *= p_bar
        return emit(outcomes, tuple(range(gamma)), target(draft.tokens), mass)

    draws = sampled(Q, analysis.chain_parents(3))
    assert tv_from_target(RULES["block"], draws) == 0
    assert tv_from_target(rule, draws) > VISIBLE


def test_match_sampled_draft_with_a_residual():
    """Accepting with chance p(x) for a sampled draft, then the residual of the soft q."""

    def rule(draft, target):
        p, token, q = target(()), draft.tokens[0], draft.laws[0]
        outcomes = emit({}, (0,), target((token,)), p[token])
        return emit(outcomes, (), analysis.residual(p, q), 1 - p[token])

    assert tv_from_target(rule, sampled(Q, (-1,))) > VISIBLE


def test_one_uniform_for_draft_and_accept():
    """The token is drawn by inverse CDF from the uniform that then decides its acceptance."""

    def rule(draft, target):
        p, token, q = target(()), draft.tokens[0], draft.laws[0]
        start = sum(q[:token], Fraction(0))
        ratio = accept_chance(p[token], q[token])
        accept = max(min(ratio, start + q[token]) - start, Fraction(0)) / q[token]
        outcomes = emit({}, (0,), target((token,)), accept)
        return emit(outcomes, (), analysis.residual(p, q), 1 - accept)

    assert tv_from_target(rule, sampled(Q, (-1,))) > VISIBLE


def test_penalties_that_ignore_drafted_ancestors():
    def penalised(law, seen):
        return normalised(tuple(w / (4 if x in seen else 1) for x, w in enumerate(law)))

    def target(context):
        return penalised(P(context), set(context))

    def unaware(context):
        """The step's rule, blind to what was drafted since the context was committed."""
        return lambda draft, local: RULES["speculative"](
            draft, lambda suffix: penalised(P((*context, *suffix)), set(context))
        )

    draws = sampled(Q, CHAIN)
    assert tv_from_target(RULES["speculative"], draws, target) == 0
    assert max(tv_of_one_step(unaware, draws, target, c) for c in CONTEXTS) > VISIBLE


# --- Keys reused between steps -------------------------------------------------------------------------


def block_step(draft, target, floor):
    """Block verification when the uniform of position i is known to lie in [floor[i], 1).

    Yields (kept, next token, chance, floors of the next step if uniforms belong to absolute positions).
    """
    gamma = len(draft.tokens)
    laws = [target(draft.tokens[:i]) for i in range(gamma + 1)]
    p_bar = [Fraction(1)]
    for i in range(gamma):
        p_bar.append(min(p_bar[i] * laws[i][draft.tokens[i]] / draft.laws[i][draft.tokens[i]], Fraction(1)))
    mass, known = Fraction(1), list(floor)
    for i in range(gamma, -1, -1):
        if i == gamma:
            passes, law = p_bar[i], laws[i]
        else:
            left = tuple(max(p_bar[i] * a - b, Fraction(0)) for a, b in zip(laws[i], draft.laws[i], strict=True))
            total = sum(left)
            passes = total / (total + 1 - p_bar[i]) if total + 1 - p_bar[i] else Fraction(1)
            law = normalised(left) if total else laws[i]
        if i:
            chance = max(passes - floor[i - 1], Fraction(0)) / (1 - floor[i - 1]) if floor[i - 1] < 1 else Fraction(0)
        else:
            chance = Fraction(1)
        # Keeping i tokens and adding one moves the next step's position m to i + 1 + m here.
        next_floor = (*known[i + 1 :], *(Fraction(0),) * gamma)[:gamma]
        for token, weight in enumerate(law):
            if mass * chance * weight:
                yield i, token, mass * chance * weight, next_floor
        mass *= 1 - chance
        if i:
            known[i - 1] = max(known[i - 1], passes)


def block_output_law(draws, horizon, carry: bool):
    law = {}

    def extend(context, mass, floor):
        if len(context) >= horizon:
            law[context[:horizon]] = law.get(context[:horizon], 0) + mass
            return
        for weight, tree in draws(context):
            local = lambda suffix: P(context + suffix)  # noqa: E731
            for kept, token, chance, next_floor in block_step(tree, local, floor):
                tokens = (*context, *tree.tokens[:kept], token)
                extend(tokens, mass * weight * chance, next_floor if carry else floor)

    extend((), Fraction(1), (Fraction(0),) * len(CHAIN))
    return law


def test_keys_by_position_alone_under_block_verification():
    """Block verification looks at later positions' uniforms; the next step must not see the same ones."""
    draws, expected = sampled(Q, CHAIN), analysis.target_law(P, 3)
    assert block_output_law(draws, 3, carry=False) == expected
    assert analysis.total_variation(block_output_law(draws, 3, carry=True), expected) > VISIBLE
