"""A long run of tests in parts: `pytest --shard=0/4` takes the first, fifth, ninth, ... of those that are chosen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def parse(text: str) -> tuple[int, int]:
    """`index/count` as numbers.

    Raises:
        ValueError: it is not of that form, or the index is not below the count.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(f"--shard={text}; expected index/count with an index from 0 to count - 1, 0/4 for instance")
    return int(match[1]), int(match[2])


def part(items: Sequence[T], index: int, count: int) -> tuple[list[T], list[T]]:
    """The items of one shard, in order, and the others. Every item is in exactly one of `count` shards."""
    chosen = list(items[index::count])
    return chosen, [item for i, item in enumerate(items) if i % count != index]
