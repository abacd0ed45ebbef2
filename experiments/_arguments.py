"""Command lines of programs that take names and options rather than a config."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong on one line, as all programs do."""

    def error(self, message: str) -> NoReturn:
        """Raises ValueError with the message and where to read on."""
        raise ValueError(f"{message}; see {self.prog} --help")
