"""The few calls that most users need; everything else is in the packages."""

from specjax.api.answers import Result, generate, stream
from specjax.api.loading import load_drafter, load_target
from specjax.api.measuring import benchmark
from specjax.api.proving import certify
from specjax.api.training import train

__all__ = ["Result", "benchmark", "certify", "generate", "load_drafter", "load_target", "stream", "train"]
