"""The trainer: one jitted, donated step over plain pytrees, held-out metrics, checkpoints, exact resume."""

from __future__ import annotations

import contextlib
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
from specjax.models import Tap, merge
from specjax.models.target import Target
from specjax.parallel import Placement
from specjax.training.data import Batch, batches
from specjax.training.objectives.base import Loss, Objective
from specjax.training.online import with_hidden_states
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
        accumulate: parts that a batch is split into, one forward and backward pass each; the update is that of the
            whole batch.
        ema: decay of an exponential moving average of the parameters, which is then evaluated and exported; 0 for none.

    Raises:
        ValueError: a batch that does not split into its parts, or a decay outside [0, 1).
    """

    steps: int
    batch: int
    best: str
    seed: int = 0
    log_every: int = 10
    eval_every: int = 100
    precision: str = "float32"
    accumulate: int = 1
    ema: float = 0.0

    def __post_init__(self) -> None:
        if self.accumulate < 1 or self.batch % self.accumulate:
            raise ValueError(f"accumulate={self.accumulate}: expected a divisor of batch={self.batch}")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema={self.ema}: expected 0 for none, or a decay below 1")


@flax.struct.dataclass
class TrainState:
    """All that changes in training.

    Attributes:
        params: trainable parameters.
        opt_state: of the optimizer.
        step: int32 scalar, updates made; data order and randomness are functions of it.
        average: exponential moving average of the parameters; None without one.
    """

    params: Any
    opt_state: Any
    step: jax.Array
    average: Any = None

    @property
    def evaluated(self) -> Any:
        """The parameters that are evaluated and exported."""
        return self.params if self.average is None else self.average


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
        placement: where arrays lie; None for one device. Under it, target parameters and tables are on the mesh.
        online: layer inputs that the target computes in the step, beside its final hidden state, where the rows are
            text alone; None where the rows hold what the objective needs.
    """

    target: Target
    objective: Objective
    tables: Any
    optimizer: OptimizerConfig
    config: TrainerConfig
    train: Source
    held_out: Mapping[str, Source]
    placement: Placement | None = None
    online: tuple[Tap, ...] | None = None

    def init(self, params: Any | None = None) -> TrainState:
        """The state at step 0; `params` replaces the objective's own start."""
        return self._init(self.target.params, self.tables, params)

    def _init(self, target_params: Any, tables: Any, params: Any | None) -> TrainState:
        key = jax.random.key(self.config.seed)
        target = merge(self.target.graph, target_params)
        start = self.objective.init(key, target, tables) if params is None else params
        if self.placement is not None:
            start = self.placement.hold_drafter(start)
        opt_state = make_optimizer(self.optimizer).init(start)
        # A copy: the state is donated, and no buffer can be given away twice.
        average = jax.tree.map(jnp.copy, start) if self.config.ema else None
        return TrainState(params=start, opt_state=opt_state, step=jnp.zeros((), jnp.int32), average=average)

    def load(self, source: Source, rows: np.ndarray) -> Batch:
        """Rows of a source, filled up to a whole batch with empty ones, where the step expects them."""
        if self.placement is None:
            return _fill(source.batch(rows), self.config.batch)
        whole = np.concatenate([rows, np.full(self.config.batch - len(rows), -1)])
        return self.placement.rows(lambda some: _with_empty(source, some), whole)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update; the state is consumed."""
        return _step(self._statics, state, self.target.params, self.tables, batch)

    def lower(self, batch: Any) -> jax.stages.Lowered:
        """The update, lowered for a batch of abstract arrays, to be compiled for devices that may not be here."""
        return _step.lower(self._statics, self._abstract(), self.target.params, self.tables, batch)

    def evaluate(self, params: Any) -> dict[str, float]:
        """`<set>/<metric>` over all rows of every held-out set, each position counted once."""
        results: dict[str, float] = {}
        for name, source in self.held_out.items():
            totals: dict[str, np.ndarray] = {}
            for first in range(0, source.rows, self.config.batch):
                rows = np.arange(first, min(first + self.config.batch, source.rows))
                batch = self.load(source, rows)
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
        if jax.process_index() == 0:
            run.claim(config, free=("train.steps",))  # A run may be trained for longer.
        checkpoints = Checkpoints(run.checkpoints, self.config.best)
        with self.placement.active() if self.placement is not None else contextlib.nullcontext():
            return self._run(run, checkpoints, init, report, stop)

    def _run(
        self,
        run: RunDirectory,
        checkpoints: Checkpoints,
        init: Callable[[], Any] | None,
        report: Callable[[int, dict[str, float]], None],
        stop: Callable[[], bool],
    ) -> TrainState:
        try:
            state = checkpoints.restore(self._abstract())
            if state is None:
                state = self._place(self.init(init() if init is not None else None))
                self._save(checkpoints, run.writer(-1), state, report)
            return self._loop(run, checkpoints, state, report, stop)
        finally:
            checkpoints.close()

    def _place(self, state: TrainState) -> TrainState:
        return state if self.placement is None else self.placement.drafter_params(state)

    def _abstract(self) -> Any:
        """Shapes of the state, and where it lies."""
        shapes = jax.eval_shape(lambda p, t: self._init(p, t, None), self.target.params, self.tables)
        if self.placement is None:
            return shapes
        places = self.placement.drafter_shardings(shapes)
        return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, places)

    @property
    def _statics(self) -> _Statics:
        c = self.config
        return _Statics(
            self.target.graph,
            self.objective,
            self.optimizer,
            self.placement,
            self.online,
            precision=c.precision,
            seed=c.seed,
            accumulate=c.accumulate,
            ema=c.ema,
        )

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
            state, metrics = self.step(state, self.load(self.train, rows))
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
        step, values = int(state.step), self.evaluate(state.evaluated)
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
    placement: Placement | None
    online: tuple[Tap, ...] | None
    precision: str
    seed: int
    accumulate: int
    ema: float

    def loss(self, params: Any, target_params: Any, tables: Any, batch: Batch, key: jax.Array | None) -> Loss:
        with jax.default_matmul_precision(self.precision):
            target = merge(self.graph, target_params)
            if self.online is not None:
                batch = with_hidden_states(target, batch, self.online)
            return self.objective.loss(params, tables, target, batch, key)


@functools.partial(jax.jit, static_argnames=("statics",), donate_argnames=("state",))
def _step(
    statics: _Statics, state: TrainState, target_params: Any, tables: Any, batch: Batch
) -> tuple[TrainState, dict[str, jax.Array]]:
    key = jax.random.fold_in(jax.random.key(statics.seed), state.step)

    def graded(part: Batch, key: jax.Array) -> tuple[Loss, Any]:
        """A loss and the gradient of its sum."""

        def total(params: Any) -> tuple[jax.Array, Loss]:
            loss = statics.loss(params, target_params, tables, part, key)
            return loss.sum, loss

        grads, loss = jax.grad(total, has_aux=True)(state.params)
        return loss, grads

    loss, grads = _accumulated(graded, batch, key, statics.accumulate)
    # Divided once, by the positions of the whole batch: how it was split does not matter.
    grads = jax.tree.map(lambda g: g / jnp.maximum(loss.weight, 1.0), grads)
    updates, opt_state = make_optimizer(statics.optimizer).update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    average = state.average
    if average is not None:
        average = optax.incremental_update(params, average, 1.0 - statics.ema)
    metrics = {name: a / jnp.maximum(b, 1.0) for name, (a, b) in loss.metrics.items()}
    metrics |= {"loss": loss.mean, "grad_norm": optax.tree.norm(grads), "tokens": loss.weight}
    new = TrainState(params=params, opt_state=opt_state, step=state.step + 1, average=average)
    return new if statics.placement is None else statics.placement.hold_drafter(new), metrics


def _accumulated(
    graded: Callable[[Batch, jax.Array], tuple[Loss, Any]], batch: Batch, key: jax.Array, parts: int
) -> tuple[Loss, Any]:
    """Loss and gradients summed over the parts of a batch, one part in memory at a time."""
    if parts == 1:
        return graded(batch, key)
    # Strided, not cut: under data parallelism every part holds rows of every device.
    split = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0), batch)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(graded, jax.tree.map(lambda x: x[0], split), key)
    )

    def body(sums: tuple[Loss, Any], part: tuple[Batch, jax.Array]) -> tuple[tuple[Loss, Any], None]:
        return jax.tree.map(jnp.add, sums, graded(*part)), None

    return jax.lax.scan(body, zeros, (split, jax.random.split(key, parts)))[0]


@functools.partial(jax.jit, static_argnames=("statics",))
def _evaluate(statics: _Statics, params: Any, target_params: Any, tables: Any, batch: Batch) -> Loss:
    return statics.loss(params, target_params, tables, batch, None)


def _fill(batch: Batch, rows: int) -> Batch:
    """Empty rows behind the last one, so that every pass has one shape; they carry no loss."""
    short = rows - len(batch.tokens)
    return jax.tree.map(lambda x: np.pad(x, ((0, short), *(((0, 0),) * (x.ndim - 1)))), batch)


def _with_empty(source: Source, rows: np.ndarray) -> Batch:
    """Rows of a source; a row id of -1 is an empty row."""
    known = rows[rows >= 0]
    loaded = source.batch(known if len(known) else np.zeros(1, int))

    def spread(x: np.ndarray) -> np.ndarray:
        out = np.zeros((len(rows), *x.shape[1:]), x.dtype)
        out[rows >= 0] = x[: len(known)]
        return out

    return jax.tree.map(spread, loaded)
