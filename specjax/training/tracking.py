"""Metrics of a run in Weights & Biases and TensorBoard, beside the run directory's own."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import jax
from etils import epath

from specjax.checkpoints.rundir import RunDirectory, Sink, is_remote, write_whole

MODES = ("disabled", "offline", "online")
STATE = "wandb.json"
TENSORBOARD = "tensorboard"


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
        for step, values in _by_step(rows, self._sent).items():
            self._run.log(values, step=step)
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


class TensorBoardSink:
    """Writes event files, each step once, however often training was interrupted.

    A file is written whole and named by its last step, which is all the state there is: object stores do not append.
    """

    def __init__(self, folder: epath.Path, writer: Any):
        """Goes on where the event files of a directory end.

        Args:
            folder: of the event files.
            writer: `tensorboardX.SummaryWriter`.
        """
        self._folder, self._writer = folder, writer
        files = folder.glob(f"{_EVENTS}*") if folder.exists() else ()
        self._sent = max((int(path.name.removeprefix(_EVENTS)) for path in files), default=-1)

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """See `Sink.write`; what is no number (the rows of a batch that was skipped) is left out."""
        steps = _by_step(rows, self._sent)
        if not steps:
            return
        with tempfile.TemporaryDirectory() as aside:
            with self._writer(aside) as events:
                for step, values in steps.items():
                    for name, value in values.items():
                        if isinstance(value, int | float):
                            events.add_scalar(name, value, step)
            [file] = Path(aside).iterdir()
            self._sent = max(steps)
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._folder / f"{_EVENTS}{self._sent:012d}", file.read_bytes())


# TensorBoard takes what has "tfevents" in its name, in order of the names.
_EVENTS = "events.out.tfevents."


def tensorboard_sink(workdir: str | epath.Path, *, wanted: bool) -> tuple[Sink, ...]:
    """The sinks for a trainer: none where TensorBoard is not wanted or another process speaks.

    What the run directory has and its `tensorboard/` has not is written at the start.

    Args:
        workdir: run directory.
        wanted: whether there shall be event files.

    Raises:
        ImportError: tensorboardX is missing; says how to get it.
    """
    if not wanted or jax.process_index():
        return ()
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ImportError("--tensorboard needs tensorboardX: pip install 'specjax[tensorboard]'") from error
    directory = RunDirectory(workdir)
    sink = TensorBoardSink(directory.path / TENSORBOARD, SummaryWriter)
    sink.write(directory.metrics())
    return (sink,)


def _by_step(rows: Sequence[Mapping[str, Any]], sent: int) -> dict[int, dict[str, Any]]:
    """Values of the steps after `sent`, in order, the rows of one step as one."""
    steps: dict[int, dict[str, Any]] = {}
    for row in rows:
        if row["step"] > sent:
            steps.setdefault(row["step"], {}).update({k: v for k, v in row.items() if k != "step"})
    return dict(sorted(steps.items()))
