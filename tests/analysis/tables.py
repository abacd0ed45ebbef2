"""Small context-dependent tables of exact laws."""

import random
from collections.abc import Callable
from fractions import Fraction
from functools import cache

Law = tuple[Fraction, ...]
LawFn = Callable[[tuple[int, ...]], Law]


def random_table(name: str, vocab_size: int, positive: bool = False, sharpness: int = 1) -> LawFn:
    """A law for every context, fixed by the name; with zeros among the probabilities unless `positive`."""

    @cache
    def law(context: tuple[int, ...]) -> Law:
        rng = random.Random(f"{name} {context}")
        weights = [rng.randint(int(positive), 5) ** sharpness for _ in range(vocab_size)]
        if not sum(weights):
            weights[rng.randrange(vocab_size)] = 1
        return tuple(Fraction(w, sum(weights)) for w in weights)

    return law


def constant_table(*probabilities: str) -> LawFn:
    """The same law after every context."""
    law = tuple(Fraction(p) for p in probabilities)
    return lambda context: law


def top_k(law: Law, k: int) -> Law:
    """The law on its k most likely tokens (the lowest ids among equals), renormalised."""
    keep = sorted(range(len(law)), key=lambda x: (-law[x], x))[:k]
    total = sum(law[x] for x in keep)
    return tuple(law[x] / total if x in keep else Fraction(0) for x in range(len(law)))
