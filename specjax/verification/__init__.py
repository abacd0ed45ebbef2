"""Verification rules, one file each."""

from specjax.verification.greedy import Greedy
from specjax.verification.one_hot import OneHot
from specjax.verification.recursive import Recursive

__all__ = ["Greedy", "OneHot", "Recursive"]
