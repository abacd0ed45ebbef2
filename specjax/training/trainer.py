"""The trainer: one jitted, donated step over plain pytrees, held-out metrics, checkpoints, exact resume."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath

from specjax.checkpoints.rundir import RunDirectory
from specjax.checkpoints.train_state import Checkpoints
from specjax.models import merge
from specjax.models.target import Target
from specjax.training.data import Batch, batches
from specjax.training.objectives.base import Loss, Objective
from specjax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule


class Source(Protocol):
    """Packed rows by index: a hidden-state store, or text laid out in memory."""

    @property
    def rows(self) -> int:
        """How many there are."""

    def batch(self, rows: np.ndarray) -> Batch:
        """The rows with these indices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """What a run is, apart from objective, data and optimizer.

    Attributes:
        steps: at which training ends.
        batch: packed rows a step.
        seed: of data order and randomness.
        log_every: steps between metric rows.
        eval_every: steps between held-out evaluations, each followed by a checkpoint.
        best: held-out metric that marks the best checkpoint, `<set>/<metric>`, larger is better.
        precision: matmul precision, `float32` or `default` (the platform's).
    """

    steps: int
    batch: int
    best: str
    seed: int = 0
    log_every: int = 10
    eval_every: int = 100
    precision: str = "float32"


@flax.struct.dataclass
class TrainState:
    """All that changes in training.

    Attributes:
        params: trainable parameters.
        opt_state: of the optimizer.
        step: int32 scalar, updates made; data order and randomness are functions of it.
    """

    params: Any
    opt_state: Any
    step: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Trainer:
    """Trains the drafter of one objective for one target.

    Attributes:
        target: frozen.
        objective: what is minimised.
        tables: the drafter's tables.
        optimizer: description of the optimizer.
        config: see `TrainerConfig`.
        train: rows to learn from.
        held_out: rows to evaluate on, by name.
    """

    target: Target
    objective: Objective
    tables: Any
    optimizer: OptimizerConfig
    config: TrainerConfig
    train: Source
    held_out: Mapping[str, Source]

    def init(self, params: Any | None = None) -> TrainState:
        """The state at step 0; `params` replaces the objective's own start."""
        key = jax.random.key(self.config.seed)
        target = merge(self.target.graph, self.target.params)
        start = self.objective.init(key, target, self.tables) if params is None else params
        opt_state = make_optimizer(self.optimizer).init(start)
        return TrainState(params=start, opt_state=opt_state, step=jnp.zeros((), jnp.int32))

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update; the state is consumed."""
        return _step(self._statics, state, self.target.params, self.tables, batch)

    def evaluate(self, params: Any) -> dict[str, float]:
        """`<set>/<metric>` over all rows of every held-out set, each position counted once."""
        results: dict[str, float] = {}
        for name, source in self.held_out.items():
            totals: dict[str, np.ndarray] = {}
            for first in range(0, source.rows, self.config.batch):
                rows = np.arange(first, min(first + self.config.batch, source.rows))
                batch = _fill(source.batch(rows), self.config.batch)
                loss = _evaluate(self._statics, params, self.target.params, self.tables, batch)
                parts = {"loss": (loss.sum, loss.weight), **loss.metrics}
                for key, part in parts.items():
                    totals[key] = totals.get(key, np.zeros(2)) + np.asarray(part, np.float64)
            results |= {f"{name}/{key}": float(a / b) if b else math.nan for key, (a, b) in totals.items()}
        return results

    def run(
        self,
        workdir: str | epath.Path,
        config: Mapping[str, Any],
        *,
        init: Callable[[], Any] | None = None,
        report: Callable[[int, dict[str, float]], None] = lambda step, values: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> TrainState:
        """Trains to the last step, from the newest checkpoint of the directory where there is one.

        Args:
            workdir: run directory, local or gs://.
            config: what the run is, recorded and compared on resume.
            init: gives the parameters to start from; only called for a fresh run.
            report: called with step and metrics at every logged step and evaluation.
            stop: asked after every step; True saves and ends early.

        Raises:
            ValueError: the directory belongs to another config.
            FloatingPointError: the loss is not finite; names the step and the rows of its batch.
        """
        run = RunDirectory(workdir)
        run.claim(config, free=("train.steps",))  # A run may be trained for longer.
        checkpoints = Checkpoints(run.checkpoints, self.config.best)
        try:
            state = checkpoints.restore(jax.eval_shape(self.init))
            if state is None:
                state = self.init(init() if init is not None else None)
                self._save(checkpoints, run.writer(-1), state, report)
            return self._loop(run, checkpoints, state, report, stop)
        finally:
            checkpoints.close()

    @property
    def _statics(self) -> _Statics:
        return _Statics(self.target.graph, self.objective, self.optimizer, self.config.precision, self.config.seed)

    def _loop(
        self,
        run: RunDirectory,
        checkpoints: Checkpoints,
        state: TrainState,
        report: Callable[[int, dict[str, float]], None],
        stop: Callable[[], bool],
    ) -> TrainState:
        c, start = self.config, int(state.step)
        writer, schedule = run.writer(start), make_schedule(self.optimizer)
        clock, seen = time.monotonic(), 0
        for step, rows in batches(self.train.rows, c.batch, c.seed, start):
            if step >= c.steps:
                break
            state, metrics = self.step(state, self.train.batch(rows))
            done, seen = step + 1, seen + 1
            ending = done == c.steps or stop()
            if done % c.log_every == 0 or ending:
                values = {f"train/{key}": float(value) for key, value in metrics.items()}
                if not math.isfinite(values["train/loss"]):
                    raise FloatingPointError(
                        f"the loss of step {done} is {values['train/loss']} (rows {rows.tolist()}): lower the "
                        f"learning rate, or look at these rows; the last good checkpoint is {checkpoints.latest}"
                    )
                values["train/learning_rate"] = float(schedule(step))
                values["train/rows_per_second"] = seen * c.batch / (time.monotonic() - clock)
                clock, seen = time.monotonic(), 0
                writer.write(done, **values)
                report(done, values)
            if done % c.eval_every == 0 or ending:
                self._save(checkpoints, writer, state, report)
                clock, seen = time.monotonic(), 0
            if ending:
                break
        return state

    def _save(
        self,
        checkpoints: Checkpoints,
        writer: Any,
        state: TrainState,
        report: Callable[[int, dict[str, float]], None],
    ) -> None:
        step, values = int(state.step), self.evaluate(state.params)
        writer.write(step, **values)
        report(step, values)
        checkpoints.save(step, state, values)
        writer.flush()


@dataclasses.dataclass(frozen=True)
class _Statics:
    """The hashable part of a compiled step."""

    graph: Any
    objective: Objective
    optimizer: OptimizerConfig
    precision: str
    seed: int

    def loss(self, params: Any, target_params: Any, tables: Any, batch: Batch, key: jax.Array) -> Loss:
        with jax.default_matmul_precision(self.precision):
            return self.objective.loss(params, tables, merge(self.graph, target_params), batch, key)


@functools.partial(jax.jit, static_argnames=("statics",), donate_argnames=("state",))
def _step(
    statics: _Statics, state: TrainState, target_params: Any, tables: Any, batch: Batch
) -> tuple[TrainState, dict[str, jax.Array]]:
    key = jax.random.fold_in(jax.random.key(statics.seed), state.step)

    def mean(params: Any) -> tuple[jax.Array, Loss]:
        loss = statics.loss(params, target_params, tables, batch, key)
        return loss.mean, loss

    (value, loss), grads = jax.value_and_grad(mean, has_aux=True)(state.params)
    updates, opt_state = make_optimizer(statics.optimizer).update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {name: a / jnp.maximum(b, 1.0) for name, (a, b) in loss.metrics.items()}
    metrics |= {"loss": value, "grad_norm": optax.tree.norm(grads), "tokens": loss.weight}
    return TrainState(params=params, opt_state=opt_state, step=state.step + 1), metrics


@functools.partial(jax.jit, static_argnames=("statics",))
def _evaluate(statics: _Statics, params: Any, target_params: Any, tables: Any, batch: Batch) -> Loss:
    return statics.loss(params, target_params, tables, batch, jax.random.key(0))


def _fill(batch: Batch, rows: int) -> Batch:
    """Empty rows behind the last one, so that every pass has one shape; they carry no loss."""
    short = rows - len(batch.tokens)
    return jax.tree.map(lambda x: np.pad(x, ((0, short), *(((0, 0),) * (x.ndim - 1)))), batch)
