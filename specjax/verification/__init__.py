"""Verification rules, one file each."""

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

__all__ = [
    "Block",
    "Greedy",
    "KSeq",
    "Lenient",
    "OneHot",
    "Recursive",
    "Sequoia",
    "SpecInfer",
    "Speculative",
    "Threshold",
    "Traversal",
    "Typical",
]
