"""Metrics of a run in Weights & Biases, beside the run directory's own."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import jax
from etils import epath

from specjax.checkpoints.rundir import RunDirectory, Sink, is_remote, write_whole

MODES = ("disabled", "offline", "online")
STATE = "wandb.json"


class WandbSink:
    """Sends rows to a run of Weights & Biases, each step once, however often training was interrupted."""

    def __init__(self, run: Any, state: epath.Path, sent: int):
        """Takes over a run.

        Args:
            run: of `wandb.init`.
            state: file that keeps the run's id and the last step sent.
            sent: last step that the run has, -1 for none.
        """
        self._run, self._state, self._sent = run, state, sent

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """See `Sink.write`; rows of one step go as one."""
        steps: dict[int, dict[str, Any]] = {}
        for row in rows:
            steps.setdefault(row["step"], {}).update({k: v for k, v in row.items() if k != "step"})
        for step in sorted(step for step in steps if step > self._sent):
            self._run.log(steps[step], step=step)
            self._sent = step
        write_whole(self._state, json.dumps({"id": self._run.id, "sent": self._sent}) + "\n")


@contextlib.contextmanager
def wandb_sink(
    workdir: str | epath.Path, config: Mapping[str, Any], *, mode: str, project: str
) -> Iterator[tuple[Sink, ...]]:
    """A context with the sinks for a trainer: none where the mode is `disabled` or another process speaks.

    The run's id lies beside the checkpoints, so that a resumed run goes on under it. What the run directory has and
    Weights & Biases has not is sent at the start.

    Args:
        workdir: run directory.
        config: shown with the run.
        mode: `disabled`, `offline` or `online`.
        project: of Weights & Biases.

    Raises:
        ValueError: an unknown mode.
        ImportError: wandb is missing; says how to get it.
    """
    if mode not in MODES:
        raise ValueError(f"wandb mode {mode!r} is unknown; expected {', '.join(MODES)}")
    if mode == "disabled" or jax.process_index():
        yield ()
        return
    try:
        import wandb
    except ImportError as error:
        raise ImportError(f"--wandb={mode} needs wandb: pip install 'specjax[wandb]'") from error
    directory = RunDirectory(workdir)
    state = directory.path / STATE
    known: dict[str, Any] = json.loads(state.read_text()) if state.exists() else {"id": None, "sent": -1}
    remote = is_remote(directory.path)
    if not remote:
        directory.path.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        id=known["id"],
        resume="allow",
        mode=cast(Literal["offline", "online"], mode),
        project=project,
        name=directory.path.name,
        config=dict(config),
        # wandb writes to local disks only; by default it takes the working directory.
        dir=None if remote else os.fspath(directory.path),
    )
    try:
        sink = WandbSink(run, state, known["sent"])
        if rows := directory.metrics():
            sink.write(rows)
        yield (sink,)
    finally:
        run.finish()
