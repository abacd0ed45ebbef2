"""specjax: speculative decoding research in JAX."""

from specjax.api import Result, benchmark, certify, generate, load_drafter, load_target, stream, train
from specjax.build import load_config

__all__ = [
    "Result",
    "benchmark",
    "certify",
    "generate",
    "load_config",
    "load_drafter",
    "load_target",
    "stream",
    "train",
]
