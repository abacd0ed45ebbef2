"""What happens when a loss is not finite: the run stops, or skips the update, keeps its rows and stops after ten."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.rundir import MetricsWriter

PATIENCE = 10  # Updates in a row that may be skipped.


class Guard:
    """Looks for losses that are not finite, without waiting for every step: metrics are kept until they are needed."""

    def __init__(self, policy: str, writer: MetricsWriter, latest: Callable[[], int | None]):
        self._policy, self._writer, self._latest = policy, writer, latest
        self._seen: list[tuple[int, np.ndarray, dict[str, jax.Array]]] = []
        self._skipped = 0

    def saw(self, step: int, rows: np.ndarray, metrics: dict[str, jax.Array]) -> None:
        """Takes note of a step."""
        self._seen.append((step, rows, metrics))

    def check(self) -> list[tuple[int, dict[str, jax.Array]]]:
        """The good steps since the last check, with their metrics.

        Raises:
            FloatingPointError: a step was bad, and the policy is to stop or patience is at its end.
        """
        good = []
        for step, rows, metrics in self._seen:
            if metrics["finite"]:
                good.append((step, metrics))
                self._skipped = 0
                continue
            self._skipped += 1
            if self._policy == "stop" or self._skipped == PATIENCE:
                name = "loss" if not jnp.isfinite(metrics["loss"]) else "grad_norm"
                count = f", the {PATIENCE}th in a row" if self._policy == "skip" else ""
                raise FloatingPointError(
                    f"the {name} of step {step} is {float(metrics[name])} (rows {rows.tolist()}){count}: lower the "
                    f"learning rate, or look at these rows; the last good checkpoint is {self._latest()}"
                )
            self._writer.write(step, **{"train/skipped_rows": rows.tolist()})
        self._seen = []
        return good
