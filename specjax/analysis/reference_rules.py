"""Verification rules straight from the papers, over fractions: ground truth for tests of the compiled rules.

Each rule takes one realised draft and the target's law given the drafted tokens so far, and returns the exact
probability of every outcome, its accept events integrated. Written apart from the compiled rules, for clarity
alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache

from specjax.analysis.enumeration import (
    ONE,
    ZERO,
    DraftTree,
    Law,
    LawFn,
    Outcome,
    Outcomes,
    Rule,
    Tokens,
    chain_parents,
    path_to,
)


def speculative(draft: DraftTree, target: LawFn) -> Outcomes:
    """Speculative sampling of a chain, token by token (Leviathan et al. 2023, algorithm 1; Chen et al. 2023).

    Position i is kept with chance min(1, p_i(x_i) / q_i(x_i)); at the first failure the next token comes from
    norm(max(p - q, 0)), after the last one from p.
    """
    _require_chain(draft, "speculative")
    outcomes: Outcomes = {}
    kept = ONE
    for i, (token, q) in enumerate(zip(draft.tokens, draft.laws, strict=True)):
        p = target(draft.tokens[:i])
        accept = _accept(p[token], q[token])
        _emit(outcomes, tuple(range(i)), residual(p, q), kept * (1 - accept))
        kept *= accept
    _emit(outcomes, tuple(range(len(draft.tokens))), target(draft.tokens), kept)
    return outcomes


def recursive(draft: DraftTree, target: LawFn) -> Outcomes:
    """Recursive rejection down a tree.

    The children are tried in order, and at each failure p becomes norm(max(p - q, 0)). With iid children
    SpecInfer's multi-step rule (Miao et al. 2024, algorithm 2), with laws conditioned on earlier siblings
    sampling without replacement (Chen et al. 2024, Sequoia; Jeon et al. 2024), with one-hot laws EAGLE's and
    Medusa's exact tree rule, with a law a member an exact ensemble.
    """
    outcomes: Outcomes = {}

    def visit(node: int, path: Tokens, suffix: Tokens, mass: Fraction) -> None:
        p = tuple(target(suffix))
        for child in draft.children(node):
            token, q = draft.tokens[child], draft.laws[child]
            accept = _accept(p[token], q[token])
            if accept:
                visit(child, (*path, child), (*suffix, token), mass * accept)
            mass *= 1 - accept
            p = residual(p, q)
        _emit(outcomes, path, p, mass)

    visit(-1, (), (), ONE)
    return outcomes


def one_hot(draft: DraftTree, target: LawFn) -> Outcomes:
    """Sample y ~ p at every position and follow the children that carry y: exact for every draft.

    The accepted path is the longest match, of the lowest index among equals (children may repeat a token).
    """
    outcomes: Outcomes = {}

    def visit(nodes: Tokens, path: Tokens, suffix: Tokens, mass: Fraction) -> None:
        for token, chance in enumerate(target(suffix)):
            matches = tuple(c for node in nodes for c in draft.children(node) if draft.tokens[c] == token)
            if matches and chance:
                visit(matches, path_to(draft.parents, min(matches)), (*suffix, token), mass * chance)
            elif chance:
                _add(outcomes, Outcome(path, token), mass * chance)

    visit((-1,), (), (), ONE)
    return outcomes


def block(draft: DraftTree, target: LawFn) -> Outcomes:
    """Block verification of a chain (Sun et al. 2024, algorithm 2).

    `pbar_i = min(pbar_{i-1} p(x_i) / q(x_i), 1)`; position i < gamma is tested with
    `h_i = S_i / (S_i + 1 - pbar_i)`, `S_i = sum_v max(pbar_i p_{i+1}(v) - q_{i+1}(v), 0)`, position gamma
    with `h_gamma = pbar_gamma`; the largest i that passes is kept, and the next token comes from
    norm(max(pbar_i p_{i+1} - q_{i+1}, 0)), or from p after gamma.
    """
    _require_chain(draft, "block")
    gamma = len(draft.tokens)
    laws = [tuple(target(draft.tokens[:i])) for i in range(gamma + 1)]
    p_bar = [ONE]
    for i in range(gamma):
        token = draft.tokens[i]
        p_bar.append(_clipped_ratio(p_bar[i], laws[i][token], draft.laws[i][token]))
    outcomes: Outcomes = {}
    mass = ONE
    for i in range(gamma, -1, -1):
        if i == gamma:
            passes, next_law = p_bar[gamma], laws[gamma]
        else:
            passes, next_law = _weighted_residual(p_bar[i], laws[i], draft.laws[i])
        _emit(outcomes, tuple(range(i)), next_law, mass * passes)
        mass *= 1 - passes
    return outcomes


def traversal(draft: DraftTree, target: LawFn) -> Outcomes:
    """Traversal verification of a tree, leaf to root (Weng et al. 2025); on a chain it is block verification.

    A node Y carries the chance a(Y) that it or a descendant is kept, given its token: a(root) = 1 and
    a(x) = min(a(Y) p(x) / q(x), 1). A leaf is kept with chance a. When a child drawn from q fails,
    `S = sum max(a p - q, 0)`, the parent's law becomes norm(max(a p - q, 0)) and its chance S / (S + 1 - a):
    the child took min(a p, q) of the mass a p, so S is what is left, spread over the 1 - (a - S) of cases in
    which it failed. That this gives the target's law is an induction over the tree, for iid children as for
    children drawn without replacement.
    """
    outcomes: Outcomes = {}

    def visit(node: int, path: Tokens, suffix: Tokens, chance: Fraction, mass: Fraction) -> Fraction:
        """Emits what is kept at or below the node and returns the mass that fails there."""
        p = tuple(target(suffix))
        for child in draft.children(node):
            token, q = draft.tokens[child], draft.laws[child]
            below = _clipped_ratio(chance, p[token], q[token])
            mass = visit(child, (*path, child), (*suffix, token), below, mass)
            chance, p = _weighted_residual(chance, p, q)
        _emit(outcomes, path, p, mass * chance)
        return mass * (1 - chance)

    visit(-1, (), (), ONE, ONE)
    return outcomes


def k_seq(draft: DraftTree, target: LawFn) -> Outcomes:
    """SpecTr's k-SEQ down a tree of iid children, rho as `k_seq_rho` gives it (Sun et al. 2023, algorithm 3).

    Each of the k children is tried with chance min(1, p / (rho q)). If all fail, the next token comes from
    `p - min(q, p / rho) (1 - (1 - beta)^k) / beta`, normalised, `beta = sum min(q, p / rho)`.

    Raises:
        ValueError: siblings whose laws differ (k-SEQ is defined for iid children).
    """
    outcomes: Outcomes = {}

    def visit(node: int, path: Tokens, suffix: Tokens, mass: Fraction) -> None:
        p, children = tuple(target(suffix)), draft.children(node)
        if children:
            q = draft.laws[children[0]]
            if any(draft.laws[child] != q for child in children):
                raise ValueError(
                    f"children {children} of node {node} have different laws: k-SEQ needs iid children; "
                    "use recursive or traversal."
                )
            rho = k_seq_rho(p, q, len(children))
            for child in children:
                token = draft.tokens[child]
                accept = _accept(p[token], rho * q[token])
                if accept:
                    visit(child, (*path, child), (*suffix, token), mass * accept)
                mass *= 1 - accept
            p = _k_seq_residual(p, q, len(children), rho)
        _emit(outcomes, path, p, mass)

    visit(-1, (), (), ONE)
    return outcomes


REFERENCE_RULES: Mapping[str, Rule] = {
    "speculative": speculative,
    "recursive": recursive,
    "one_hot": one_hot,
    "block": block,
    "traversal": traversal,
    "k_seq": k_seq,
}


def residual(p: Sequence[Fraction], q: Sequence[Fraction]) -> Law:
    """norm(max(p - q, 0)); p itself where nothing is left."""
    return _normalised([max(a - b, ZERO) for a, b in zip(p, q, strict=True)], p)


def k_seq_rho(p: Sequence[Fraction], q: Sequence[Fraction], k: int, bits: int = 20) -> Fraction:
    """The smallest multiple of 2^-bits in [1, k] at which k-SEQ is valid: `1 - (1 - beta)^k <= rho beta`.

    `beta = sum min(q, p / rho)`. The left side falls and the right side grows with rho, and both the paper's
    root and every larger rho give an exact rule; the smallest accepts most. The root itself may be
    irrational.
    """
    return _smallest_rho(tuple(p), tuple(q), k, bits)


@lru_cache(maxsize=4096)
def _smallest_rho(p: Law, q: Law, k: int, bits: int) -> Fraction:
    scale = 2**bits

    def valid(step: int) -> bool:
        rho = Fraction(step, scale)
        beta = sum((min(b, a / rho) for a, b in zip(p, q, strict=True)), ZERO)
        return 1 - (1 - beta) ** k <= rho * beta

    low, high = scale, k * scale
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if valid(middle) else (middle + 1, high)
    return Fraction(high, scale)


def _k_seq_residual(p: Law, q: Law, k: int, rho: Fraction) -> Law:
    share = [min(b, a / rho) for a, b in zip(p, q, strict=True)]
    beta = sum(share, ZERO)
    if not beta:
        return p
    scale = (1 - (1 - beta) ** k) / beta
    return _normalised([a - s * scale for a, s in zip(p, share, strict=True)], p)


# --- Pieces -------------------------------------------------------------------------------------------


def _accept(p_x: Fraction, q_x: Fraction) -> Fraction:
    """Chance of u < p/q; at q = 0 (a drafter that lies about its law) p/q is infinite, or no number."""
    if not q_x:
        return ONE if p_x else ZERO
    return min(ONE, p_x / q_x)


def _clipped_ratio(chance: Fraction, p_x: Fraction, q_x: Fraction) -> Fraction:
    return _accept(chance * p_x, q_x)


def _weighted_residual(chance: Fraction, p: Law, q: Law) -> tuple[Fraction, Law]:
    """`S / (S + 1 - a)` and norm(max(a p - q, 0)), for the mass a left to p after a draw from q failed."""
    left = [max(chance * a - b, ZERO) for a, b in zip(p, q, strict=True)]
    total = sum(left, ZERO)
    denominator = total + 1 - chance
    return (total / denominator if denominator else ONE), _normalised(left, p)


def _normalised(weights: Sequence[Fraction], fallback: Sequence[Fraction]) -> Law:
    total = sum(weights, ZERO)
    return tuple(w / total for w in weights) if total else tuple(fallback)


def _add(outcomes: Outcomes, outcome: Outcome, mass: Fraction) -> None:
    outcomes[outcome] = outcomes.get(outcome, ZERO) + mass


def _emit(outcomes: Outcomes, path: Tokens, law: Sequence[Fraction], mass: Fraction) -> None:
    for token, chance in enumerate(law):
        if mass * chance:
            _add(outcomes, Outcome(path, token), mass * chance)


def _require_chain(draft: DraftTree, rule: str) -> None:
    if draft.parents != chain_parents(len(draft.parents)):
        raise ValueError(
            f"rule {rule} verifies chains, the draft has parents {draft.parents}: use recursive or traversal."
        )
