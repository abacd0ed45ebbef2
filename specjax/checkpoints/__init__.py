"""Checkpoints: targets in from every common format and back out, drafters, training state."""

from specjax.checkpoints.sources import from_directory, load_target, save_target

__all__ = ["from_directory", "load_target", "save_target"]
