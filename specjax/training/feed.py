"""From rows to batches where the step expects them, read ahead by Grain.

The rows of a step are a pure function of (rows, batch, seed, step): nothing about data is saved with a checkpoint, and
a run goes on exactly on any number of hosts, each of which reads the rows of its own devices alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Protocol

import jax
import numpy as np

from specjax.parallel import Placement
from specjax.training.data import Batch, order

THREADS, AHEAD = 2, 2  # Readers, and batches that wait.
LOOK = 8  # Rows at a time that are looked through for one with loss; the first have it, as a rule.


class Source(Protocol):
    """Packed rows by index: a hidden-state store, or text laid out in memory."""

    @property
    def rows(self) -> int:
        """How many there are."""

    def batch(self, rows: np.ndarray) -> Batch:
        """The rows with these indices."""


def batch_rows(rows: int, batch: int, seed: int, step: int) -> np.ndarray:
    """Int indices `[batch]` of the rows of a step: epochs without repetition, each in an order of its own.

    Raises:
        ValueError: a batch is larger than the data.
    """
    if not 0 < batch <= rows:
        raise ValueError(f"batch={batch} rows of a data set of {rows} rows; expected 1 to {rows}")
    epoch, place = divmod(step, rows // batch)
    return _order(rows, seed, epoch)[place * batch : (place + 1) * batch]


def batches(rows: int, batch: int, seed: int, start: int) -> Iterator[tuple[int, np.ndarray]]:
    """Endless: step number and the indices of its rows."""
    return ((step, batch_rows(rows, batch, seed, step)) for step in itertools.count(start))


def feed(
    source: Source, batch: int, seed: int, start: int, stop: int, placement: Placement | None
) -> Iterator[tuple[np.ndarray, Batch]]:
    """Row indices and batches of the steps from `start` up to `stop`, the next ones read while one is used."""
    import grain  # With it come threads and flags, which reading a data module needs not.

    def read(step: int) -> tuple[np.ndarray, Batch]:
        rows = batch_rows(source.rows, batch, seed, step)
        return rows, load(source, rows, batch, placement)

    if start >= stop:
        return iter(())
    batch_rows(source.rows, batch, seed, start)  # What is wrong is said here, not by a reader.
    plan = grain.MapDataset.range(start, stop).map(read)
    return iter(plan.to_iter_dataset(grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=AHEAD)))


def check_loss(source: Source, what: str) -> None:
    """Sees to it that a position of some rows, called `what`, predicts a token of an answer.

    Raises:
        ValueError: none does: there is nothing to learn, or to choose a checkpoint by.
    """
    some = (source.batch(np.arange(i, min(i + LOOK, source.rows))) for i in range(0, source.rows, LOOK))
    if not any(np.any(batch.predicts) for batch in some):
        raise ValueError(
            f"no position of {what} ({source.rows}) carries loss: none predicts a token of an answer; give more text, "
            "or a larger row length"
        )


def load(source: Source, rows: np.ndarray, batch: int, placement: Placement | None) -> Batch:
    """Rows of a source, filled up to `batch` with empty ones, where the step expects them.

    Every pass has one shape then; empty rows carry no loss.
    """
    whole = np.concatenate([rows, np.full(batch - len(rows), -1, rows.dtype)])
    if placement is None:
        return _with_empty(source, whole)
    return placement.rows(lambda some: _with_empty(source, some), whole)


@functools.lru_cache(maxsize=4)
def _order(rows: int, seed: int, epoch: int) -> np.ndarray:
    return order(rows, seed, epoch)


def _with_empty(source: Source, rows: np.ndarray) -> Batch:
    """Rows of a source; a row id of -1 is an empty row."""
    known = rows[rows >= 0]
    loaded = source.batch(known if len(known) else np.zeros(1, int))
    if len(known) == len(rows):
        return loaded

    def spread(x: np.ndarray) -> np.ndarray:
        out = np.zeros((len(rows), *x.shape[1:]), x.dtype)
        out[rows >= 0] = x[: len(known)]
        return out

    return jax.tree.map(spread, loaded)
