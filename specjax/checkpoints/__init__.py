"""Checkpoints: targets in from every common format and back out, drafters, training state."""

from specjax.checkpoints.directory import from_directory, save_target
from specjax.checkpoints.sources import load_target, locate

__all__ = ["from_directory", "load_target", "locate", "save_target"]
