"""Verification rules by name. A rule is one file beside this one, and one line here."""

from __future__ import annotations

from collections.abc import Callable

from specjax.decoding import Rule
from specjax.verification.block import Block
from specjax.verification.greedy import Greedy
from specjax.verification.k_seq import KSeq
from specjax.verification.lenient import Lenient
from specjax.verification.one_hot import OneHot
from specjax.verification.presets import Sequoia, SpecInfer, Speculative
from specjax.verification.recursive import Recursive
from specjax.verification.threshold import Threshold
from specjax.verification.traversal import Traversal
from specjax.verification.typical import Typical

# name -> maker(depth, **options)
RULES: dict[str, Callable[..., Rule]] = {
    "block": Block,
    "greedy": Greedy,
    "k_seq": KSeq,
    "lenient": Lenient,
    "one_hot": OneHot,
    "recursive": Recursive,
    "sequoia": Sequoia,
    "specinfer": SpecInfer,
    "speculative": Speculative,
    "threshold": Threshold,
    "traversal": Traversal,
    "typical": Typical,
}


LOSSY = " (lossy)"  # ends the name of such a rule in results


def is_lossy(rule: Rule) -> bool:
    """Whether a rule changes the output law on every kind of draft."""
    return not rule.exact_for


def label(name: str, rule: Rule) -> str:
    """A rule's name as results give it: a lossy one says so."""
    return f"{name}{LOSSY}" if is_lossy(rule) else name
