"""specjax: speculative decoding research in JAX."""

from specjax.api import Result, certify, generate, load_drafter, load_target, stream
from specjax.build import load_config

__all__ = ["Result", "certify", "generate", "load_config", "load_drafter", "load_target", "stream"]
