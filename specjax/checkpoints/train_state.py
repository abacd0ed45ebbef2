"""Training checkpoints: a thin layer over Orbax. The two newest and the best are kept; a save is whole or absent."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import warnings
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers

from specjax.checkpoints.rundir import is_remote


class Checkpoints:
    """Checkpoints of one run, by step."""

    def __init__(self, directory: epath.Path, metric: str, *, mode: str = "max"):
        """Opens or makes the directory.

        Args:
            directory: of this run alone.
            metric: name of the held-out figure that decides which checkpoint is the best.
            mode: `max` or `min`.
        """
        self._metric, self._directory = metric, directory
        policies = checkpoint_managers.preservation_policy
        self._manager = ocp.CheckpointManager(
            _absolute(directory),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(
                    [
                        # Two: the newest may turn out to be damaged.
                        policies.LatestN(2),
                        policies.BestN(
                            get_metric_fn=lambda m: m[metric],
                            reverse=mode == "min",
                            n=1,
                            keep_checkpoints_without_metrics=False,
                        ),
                    ]
                ),
                best_fn=lambda m: m[metric],
                best_mode=mode,
                create=True,
            ),
        )

    def save(self, step: int, state: Any, metrics: dict[str, float] | None) -> None:
        """Begins to save in the background; the state may be donated as soon as this returns.

        Args:
            step: of the state.
            state: all of it.
            metrics: held-out figures; None for a state that was not evaluated, which can be gone on from and is never
                the best.

        Raises:
            ValueError: the metrics lack the one that decides.
            OSError: this or the save before it could not be written, a full disk for one; names the last good step.
        """
        if metrics is not None and self._metric not in metrics:
            raise ValueError(f"a checkpoint needs {self._metric!r} among its metrics; it has {', '.join(metrics)}")
        # Shards that other processes hold can only be written by them; what is all here is copied first.
        here = all(getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(state))
        saved = jax.tree.map(np.asarray, state) if here else state
        try:
            args = ocp.args.StandardSave(saved)
            self._manager.save(step, args=args, metrics=metrics, custom_metadata={"versions": versions()})
        except Exception as error:  # Orbax and TensorStore have many; which one tells nothing more.
            raise self._unwritten(error) from error

    def restore(self, abstract: Any, step: int | None = None) -> Any | None:
        """The state of `step`, or of the newest checkpoint that can be read; None where there is none.

        A newest checkpoint that is damaged is reported, and removed once an older one has been read in its place, so
        that training can save that step again.

        Args:
            abstract: `ShapeDtypeStruct`s of the state, with shardings where it is to be sharded.
            step: None for the newest.

        Raises:
            OSError: no checkpoint can be read; names the steps.
        """
        steps = sorted(self._manager.all_steps(), reverse=True) if step is None else [step]
        damaged: list[int] = []
        for candidate in steps:
            try:
                restored = self._manager.restore(candidate, args=ocp.args.StandardRestore(abstract))
            except Exception as error:  # whatever a damaged file leads to
                # Processes that see different files would go different ways, and wait for each other.
                if jax.process_count() > 1 or candidate == steps[-1]:
                    others = f", nor can {', '.join(map(str, damaged))}" if damaged else ""
                    raise OSError(
                        f"the checkpoint of step {candidate} in {self._directory} cannot be read{others} "
                        f"({_first_line(error)}): remove its directory to go on from an older one, or start anew"
                    ) from error
                warnings.warn(
                    f"the checkpoint of step {candidate} in {self._directory} is damaged ({_first_line(error)}); "
                    f"going on from step {steps[len(damaged) + 1]}",
                    stacklevel=2,
                )
                damaged.append(candidate)
                continue
            for bad in damaged:
                self._manager.delete(bad)
            # Donating an array that Orbax made fails silently and doubles memory: hand out arrays of JAX's own.
            return jax.jit(lambda tree: jax.tree.map(jax.numpy.copy, tree))(restored)
        return None

    def written_by(self, step: int) -> dict[str, str]:
        """Versions of the packages that wrote a checkpoint; empty for one of an older version of specjax."""
        return dict((self._manager.metadata(step).custom_metadata or {}).get("versions", {}))

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint."""
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        """Step of the best checkpoint."""
        return self._manager.best_step()

    def close(self) -> None:
        """Waits until everything is on disk.

        Raises:
            OSError: the last save could not be written; names the last good step.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._unwritten(error) from error
        finally:
            self._manager.close()

    def _unwritten(self, error: Exception) -> OSError:
        self._manager.reload()  # What is on disk, not what was hoped for.
        last = self._manager.latest_step()
        kept = "there is none before it" if last is None else f"the last good one is of step {last}, kept"
        return OSError(
            f"a checkpoint could not be written to {self._directory} ({_first_line(error)}); {kept}: make room on the "
            "disk, and start the same command again"
        )


def versions() -> dict[str, str]:
    """Of the packages that what is in a checkpoint depends on, where installed."""
    found = {}
    for name in ("specjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


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
    # A reader of its own: the other processes of a run need not take part.
    here = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"read_by_{here}"
    )
    options = ocp.CheckpointManagerOptions(
        read_only=True, create=False, save_interval_steps=0, multiprocessing_options=alone
    )
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    with ocp.CheckpointManager(_absolute(checkpoints), options=options, item_handlers=handler) as manager:
        found = {step: manager.metrics(step) for step in manager.all_steps()}
        scored = {step: dict(metrics) for step, metrics in found.items() if metrics is not None}
        if not scored:
            raise FileNotFoundError(f"{checkpoints} holds no finished and evaluated checkpoint: train first")
        sign = 1 if mode == "max" else -1
        best = max(scored, key=lambda step: (sign * scored[step][metric], step))
        # Into arrays of the host: the mesh it was saved from may not be here.
        shapes = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), manager.item_metadata(best).tree)
        state = manager.restore(best, args=ocp.args.StandardRestore(shapes))
    # The moving average is what was evaluated, where there is one.
    params = state["params"] if state.get("average") is None else state["average"]
    return best, scored[best], jax.tree.map(jax.numpy.asarray, _int_keys(params))


def _absolute(path: epath.Path) -> epath.Path:
    """Where a local path leads from here, which Orbax wants; an object store's stays as it is."""
    return path if is_remote(path) else epath.Path(os.path.abspath(path.expanduser()))


def _int_keys(tree: Any) -> Any:
    """Layer numbers as ints again: checkpoints know string keys only."""
    if not isinstance(tree, dict):
        return tree
    return {int(k) if str(k).isdigit() else k: _int_keys(v) for k, v in tree.items()}


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
