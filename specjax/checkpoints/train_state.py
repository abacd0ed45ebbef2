"""Training checkpoints: a thin layer over Orbax. The newest and the best are kept; a save is whole or absent."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers


class Checkpoints:
    """Checkpoints of one run, by step."""

    def __init__(self, directory: epath.Path, metric: str, *, mode: str = "max"):
        """Opens or makes the directory.

        Args:
            directory: of this run alone.
            metric: name of the held-out figure that decides which checkpoint is the best.
            mode: `max` or `min`.
        """
        self._metric = metric
        policies = checkpoint_managers.preservation_policy
        self._manager = ocp.CheckpointManager(
            directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(
                    [
                        policies.LatestN(1),
                        policies.BestN(get_metric_fn=lambda m: m[metric], reverse=mode == "min", n=1),
                    ]
                ),
                best_fn=lambda m: m[metric],
                best_mode=mode,
                create=True,
            ),
        )

    def save(self, step: int, state: Any, metrics: dict[str, float]) -> None:
        """Begins to save in the background; the state may be donated as soon as this returns."""
        if self._metric not in metrics:
            raise ValueError(f"a checkpoint needs {self._metric!r} among its metrics; it has {', '.join(metrics)}")
        # Shards that other processes hold can only be written by them; what is all here is copied first.
        here = all(getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(state))
        saved = jax.tree.map(np.asarray, state) if here else state
        self._manager.save(step, args=ocp.args.StandardSave(saved), metrics=metrics)

    def restore(self, abstract: Any, step: int | None = None) -> Any | None:
        """The state of `step`, or of the newest checkpoint; None where there is none.

        Args:
            abstract: `ShapeDtypeStruct`s of the state, with shardings where it is to be sharded.
            step: None for the newest.
        """
        step = self._manager.latest_step() if step is None else step
        if step is None:
            return None
        restored = self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        # Donating an array that Orbax made fails silently and doubles memory: hand out arrays of JAX's own.
        return jax.jit(lambda tree: jax.tree.map(jax.numpy.copy, tree))(restored)

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint."""
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        """Step of the best checkpoint."""
        return self._manager.best_step()

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()


def run_params(checkpoints: epath.Path, metric: str, mode: str = "max") -> tuple[int, dict[str, float], Any]:
    """The parameters alone of a run's best checkpoint, with its step and held-out metrics.

    Args:
        checkpoints: directory of a run's checkpoints.
        metric: that decides which is the best.
        mode: `max` or `min`.

    Raises:
        FileNotFoundError: there is no checkpoint.
    """
    if not checkpoints.exists():
        raise FileNotFoundError(
            f"there are no checkpoints at {checkpoints}: train first, or give another run directory"
        )
    options = ocp.CheckpointManagerOptions(read_only=True, create=False, save_interval_steps=0)
    with ocp.CheckpointManager(checkpoints, options=options) as manager:
        scored = {step: dict(manager.metrics(step)) for step in manager.all_steps()}
        if not scored:
            raise FileNotFoundError(f"{checkpoints} holds no finished checkpoint: train first")
        sign = 1 if mode == "max" else -1
        best = max(scored, key=lambda step: (sign * scored[step][metric], step))
        state = manager.restore(best, args=ocp.args.StandardRestore())
    # The moving average is what was evaluated, where there is one.
    params = state["params"] if state.get("average") is None else state["average"]
    return best, scored[best], jax.tree.map(jax.numpy.asarray, _int_keys(params))


def _int_keys(tree: Any) -> Any:
    """Layer numbers as ints again: checkpoints know string keys only."""
    if not isinstance(tree, dict):
        return tree
    return {int(k) if str(k).isdigit() else k: _int_keys(v) for k, v in tree.items()}
