"""Trained drafters in the formats of other projects, read and written."""

from specjax.checkpoints.formats.exchange import OWN, USUAL, WRITERS, read_head, write_head

__all__ = ["OWN", "USUAL", "WRITERS", "read_head", "write_head"]
