"""A trace of some steps by JAX's profiler, kept in the run directory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
from etils import epath

from specjax.checkpoints.rundir import is_remote


class StepTrace:
    """Traces a window of steps, on the first process alone."""

    def __init__(self, window: tuple[int, ...], folder: epath.Path):
        """Plans a trace.

        Args:
            window: first step, counted from 1, and how many; empty for none. A run that is resumed within the window
                traces what is left of it.
            folder: where the trace goes; XProf and TensorBoard's profile plugin read it, `xprof --logdir=<folder>`.
        """
        self._first, self._last = (window[0], window[0] + window[1] - 1) if window else (0, -1)
        self._folder = folder
        self._aside: tempfile.TemporaryDirectory[str] | None = None
        self._running = False

    def before(self, step: int) -> None:
        """Starts where the window does."""
        if self._running or jax.process_index() or not self._first <= step <= self._last:
            return
        # The profiler writes to local disks.
        self._aside = tempfile.TemporaryDirectory() if is_remote(self._folder) else None
        jax.profiler.start_trace(self._aside.name if self._aside else str(self._folder))
        self._running = True

    def after(self, step: int, outputs: Any) -> None:
        """Ends where the window does, once the outputs of its last step are there."""
        if self._running and step >= self._last:
            jax.block_until_ready(outputs)
            self.close()

    def close(self) -> None:
        """Ends a trace that is still running: training was interrupted, or failed, within the window."""
        if not self._running:
            return
        self._running = False
        jax.profiler.stop_trace()
        if self._aside is not None:
            local = Path(self._aside.name)
            for path in (p for p in local.rglob("*") if p.is_file()):
                place = self._folder / path.relative_to(local).as_posix()
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(path.read_bytes())
            self._aside.cleanup()
