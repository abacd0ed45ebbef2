"""The exact output law of a verification rule on small tables, by enumeration over fractions.

The draws of a draft are enumerated and its accept events integrated (`reference_rules`), so a law comes out
as exact `Fraction`s and "lossless" is an equality, not a statistic. Nothing here is fast.

A law is a tuple of Fractions over token ids. A target is a callable from the tokens since the prompt to the
law of the next one. A draft is one realised tree (`DraftTree`); `sampled_draws` and `fixed_draws` enumerate
drafts with their probabilities, and a planted fault is a function over what they yield, or over a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Literal, NamedTuple

Law = tuple[Fraction, ...]
Tokens = tuple[int, ...]
LawFn = Callable[[Tokens], Sequence[Fraction]]
ZERO, ONE = Fraction(0), Fraction(1)


@dataclass(frozen=True)
class DraftTree:
    """One realised draft.

    Attributes:
        parents: parent of each node, -1 for the root's children; parents come before children, and siblings
            are tried in index order.
        tokens: token of each node.
        laws: the law that the drafter says each node was drawn from, given its ancestors and earlier
            siblings.
    """

    parents: Tokens
    tokens: Tokens
    laws: tuple[Law, ...]

    def children(self, node: int) -> Tokens:
        """The node's children in index order; -1 is the root."""
        return tuple(child for child, parent in enumerate(self.parents) if parent == node)


class Outcome(NamedTuple):
    """What a rule decided: the accepted nodes from the root down, and the token it adds."""

    path: Tokens
    next_token: int


Outcomes = dict[Outcome, Fraction]
Rule = Callable[[DraftTree, LawFn], Outcomes]
DrawFn = Callable[[Tokens], Iterable[tuple[Fraction, DraftTree]]]

# --- Shapes and draws ----------------------------------------------------------------------------------


def chain_parents(gamma: int) -> Tokens:
    """Parents of a chain of gamma nodes: -1, 0, 1, ..."""
    return tuple(range(-1, gamma - 1))


def branching_parents(branching: Sequence[int]) -> Tokens:
    """Parents of the tree in which every node at depth d has `branching[d]` children, breadth first."""
    parents: list[int] = []
    frontier = [-1]
    for width in branching:
        grown = [parent for parent in frontier for _ in range(width)]
        frontier = list(range(len(parents), len(parents) + len(grown)))
        parents += grown
    return tuple(parents)


def sampled_draws(
    draft: LawFn | Sequence[LawFn],
    parents: Sequence[int],
    siblings: Literal["iid", "without_replacement"] = "iid",
    max_drafts: int = 100_000,
) -> DrawFn:
    """Every draft of a sampled tree with its probability, and with the laws its nodes were really drawn from.

    Args:
        draft: the draft's law given the tokens so far; or one such callable a node (an ensemble, where a
            child comes from its own drafter).
        parents: the tree's shape.
        siblings: `iid`, or `without_replacement`: each child is drawn from the law without its earlier
            siblings' tokens, renormalised. A node left without any token, and its descendants, are missing
            from the draft.
        max_drafts: refuse to enumerate more drafts than this at one context.

    Returns:
        A function from the tokens so far to (probability, draft) pairs that sum to one.
    """
    if siblings not in ("iid", "without_replacement"):
        raise ValueError(f"siblings is {siblings!r}: expected 'iid' or 'without_replacement'.")
    parents = tuple(parents)
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"node {node} has parent {parent}: expected -1 or a node before it.")
    law_fns = [draft] * len(parents) if callable(draft) else list(draft)
    if len(law_fns) != len(parents):
        raise ValueError(f"{len(law_fns)} draft laws for {len(parents)} nodes: expected one, or one a node.")

    def draws(context: Tokens) -> Iterator[tuple[Fraction, DraftTree]]:
        law_of = cache(lambda node, suffix: _law(law_fns[node], context + suffix, "draft"))
        yielded = 0

        def grow(node: int, mass: Fraction, drawn: dict[int, int], laws: dict[int, Law]) -> Iterator:
            nonlocal yielded
            if node == len(parents):
                yielded += 1
                if yielded > max_drafts:
                    raise ValueError(
                        f"more than max_drafts={max_drafts} drafts of {len(parents)} nodes: use a "
                        "smaller tree or vocabulary."
                    )
                yield mass, _compact(parents, drawn, laws)
                return
            parent = parents[node]
            missing = parent >= 0 and parent not in drawn
            law = None if missing else law_of(node, _tokens_to(parents, drawn, parent))
            if law is not None and siblings == "without_replacement":
                taken = {drawn[s] for s in range(node) if parents[s] == parent and s in drawn}
                law = _without(law, taken)
            if law is None:
                yield from grow(node + 1, mass, drawn, laws)
                return
            for token, chance in enumerate(law):
                if chance:
                    yield from grow(node + 1, mass * chance, drawn | {node: token}, laws | {node: law})

        yield from grow(0, ONE, {}, {})

    return draws


def fixed_draws(choose: Callable[[Tokens, int], int], parents: Sequence[int], vocab_size: int) -> DrawFn:
    """The one draft of a tree whose tokens are chosen, not drawn, with one-hot laws.

    Args:
        choose: from the tokens down to the parent and the child's rank to the token.
        parents: the tree's shape.
        vocab_size: length of the one-hot laws.
    """
    parents = tuple(parents)

    def draws(context: Tokens) -> Iterator[tuple[Fraction, DraftTree]]:
        drawn: dict[int, int] = {}
        for node, parent in enumerate(parents):
            rank = sum(parents[s] == parent for s in range(node))
            drawn[node] = choose(context + _tokens_to(parents, drawn, parent), rank)
        tokens = tuple(drawn[node] for node in range(len(parents)))
        yield ONE, DraftTree(parents, tokens, tuple(one_hot_law(token, vocab_size) for token in tokens))

    return draws


def one_hot_law(token: int, vocab_size: int) -> Law:
    """The law that always gives `token`."""
    return tuple(ONE if x == token else ZERO for x in range(vocab_size))


# --- Enumeration ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepLaw:
    """The exact law of one speculative step.

    Attributes:
        emitted: probability of each emitted sequence (accepted tokens and the next one).
        accepted: probability of each number of accepted tokens.
    """

    emitted: Mapping[Tokens, Fraction]
    accepted: Mapping[int, Fraction]

    @property
    def expected_accepted(self) -> Fraction:
        """Expected number of accepted tokens, the next token not counted."""
        return sum((n * mass for n, mass in self.accepted.items()), ZERO)


def enumerate_step(rule: Rule, target: LawFn, draws: DrawFn, context: Tokens = ()) -> StepLaw:
    """The exact law of what one step emits after `context`.

    Raises:
        ValueError: the drafts' probabilities or a rule's outcomes do not sum to exactly one.
    """
    local = cache(lambda suffix: _law(target, context + suffix, "target"))
    emitted: dict[Tokens, Fraction] = {}
    accepted: dict[int, Fraction] = {}
    drawn = ZERO
    for weight, draft in draws(context):
        drawn += weight
        outcomes = rule(draft, local)
        if sum(outcomes.values()) != 1:
            raise ValueError(f"the rule's outcomes for {draft.tokens} after {context} sum to {sum(outcomes.values())}.")
        for (path, next_token), chance in outcomes.items():
            tokens = (*(draft.tokens[node] for node in path), next_token)
            emitted[tokens] = emitted.get(tokens, ZERO) + weight * chance
            accepted[len(path)] = accepted.get(len(path), ZERO) + weight * chance
    if drawn != 1:
        raise ValueError(f"the drafts after {context} have probability {drawn} in sum: expected 1.")
    return StepLaw(emitted, accepted)


def enumerate_output_law(rule: Rule, target: LawFn, draws: DrawFn, horizon: int) -> dict[Tokens, Fraction]:
    """The exact joint law of the first `horizon` tokens that speculative decoding emits, step after step.

    The rule is lossless on these tables iff this equals `target_law(target, horizon)`. Taking more tokens
    than one step emits also shows faults that appear only in a later step.
    """
    step = cache(lambda context: enumerate_step(rule, target, draws, context).emitted)

    @cache
    def rest(context: Tokens) -> dict[Tokens, Fraction]:
        left = horizon - len(context)
        law: dict[Tokens, Fraction] = {}
        for tokens, mass in step(context).items():
            head = tokens[:left]
            tails = rest(context + head) if len(head) < left else {(): ONE}
            for tail, chance in tails.items():
                law[head + tail] = law.get(head + tail, ZERO) + mass * chance
        return law

    if horizon < 1:
        raise ValueError(f"horizon is {horizon}: expected at least one token.")
    return {tokens: mass for tokens, mass in sorted(rest(()).items()) if mass}


def target_law(target: LawFn, horizon: int) -> dict[Tokens, Fraction]:
    """The exact joint law of `horizon` tokens of plain decoding."""
    law: dict[Tokens, Fraction] = {(): ONE}
    for _ in range(horizon):
        law = {
            (*tokens, x): mass * chance
            for tokens, mass in law.items()
            for x, chance in enumerate(_law(target, tokens, "target"))
            if chance
        }
    return law


def total_variation(a: Mapping[Tokens, Fraction], b: Mapping[Tokens, Fraction]) -> Fraction:
    """Total variation distance of two laws, half the sum of absolute differences."""
    return sum((abs(a.get(x, ZERO) - b.get(x, ZERO)) for x in a.keys() | b.keys()), ZERO) / 2


def law_vector(law: Mapping[Tokens, Fraction], vocab_size: int, horizon: int) -> list[float]:
    """A joint law as floats over all `vocab_size ** horizon` sequences, the first token most significant."""
    return [float(law.get(tokens, ZERO)) for tokens in product(range(vocab_size), repeat=horizon)]


# --- Pieces -------------------------------------------------------------------------------------------


def _law(law_fn: LawFn, context: Tokens, name: str) -> Law:
    law = tuple(law_fn(context))
    if any(not isinstance(x, Fraction | int) or x < 0 for x in law) or sum(law) != 1:
        raise ValueError(f"the {name} law after {context} is {law}: expected Fractions >= 0 that sum to exactly 1.")
    return law


def _without(law: Law, taken: set[int]) -> Law | None:
    left = [ZERO if x in taken else chance for x, chance in enumerate(law)]
    total = sum(left, ZERO)
    return tuple(w / total for w in left) if total else None


def path_to(parents: Sequence[int], node: int) -> Tokens:
    """The nodes from the root down to `node`; none for the root, -1."""
    path: Tokens = ()
    while node >= 0:
        path, node = (node, *path), parents[node]
    return path


def _tokens_to(parents: Sequence[int], drawn: Mapping[int, int], node: int) -> Tokens:
    return tuple(drawn[n] for n in path_to(parents, node))


def _compact(parents: Tokens, drawn: Mapping[int, int], laws: Mapping[int, Law]) -> DraftTree:
    """The draft without missing nodes, renumbered."""
    place = {node: i for i, node in enumerate(sorted(drawn))} | {-1: -1}
    kept = sorted(drawn)
    return DraftTree(
        tuple(place[parents[node]] for node in kept),
        tuple(drawn[n] for n in kept),
        tuple(laws[n] for n in kept),
    )
