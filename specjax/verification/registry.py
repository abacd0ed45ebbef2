"""Verification rules by name. A rule is one file beside this one, and one line here."""

from __future__ import annotations

from collections.abc import Callable

from specjax.decoding import Rule
from specjax.verification.greedy import Greedy
from specjax.verification.one_hot import OneHot
from specjax.verification.recursive import Recursive

# name -> maker(depth)
RULES: dict[str, Callable[[int], Rule]] = {
    "greedy": Greedy,
    "one_hot": OneHot,
    "recursive": Recursive,
    "speculative": Recursive,
}
