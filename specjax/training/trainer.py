"""The trainer: one jitted, donated step over plain pytrees, held-out metrics, checkpoints, exact resume."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from specjax.checkpoints.rundir import MetricsWriter, RunDirectory, Sink
from specjax.checkpoints.train_state import Checkpoints
from specjax.decoding import check_precision
from specjax.decoding.sampling import check_seed
from specjax.models import Tap, merge
from specjax.models.remat import check_remat
from specjax.models.target import Target
from specjax.parallel import Agreement, Placement, batch_shardings
from specjax.training import feed
from specjax.training.data import Batch
from specjax.training.feed import Source
from specjax.training.guard import Guard
from specjax.training.identity import data_identity, target_identity
from specjax.training.objectives.base import Objective
from specjax.training.on_policy import FOLDER, Mixer, OnPolicy
from specjax.training.optimizer import OptimizerConfig, ends_at_0, make_optimizer, make_schedule
from specjax.training.pace import Pace, StepFlops, peak_flops, step_flops
from specjax.training.profiling import StepTrace
from specjax.training.step import Statics, TrainState, as_kept, evaluate, update

# What of the config may change when a run is resumed: it may be trained for longer, and a store that has grown be cut
# to what it was; whether it is that is seen by the number of rows.
FREE = (
    *("train.steps", "train.nonfinite", "train.profile", "train.remat", "data.max_shards"),
    *("decoding.prompts", "decoding.prompts_per_category", "decoding.max_new_tokens"),
)


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
        remat: what the backward pass computes again of layers and drafted steps, to hold less at a time: `none`,
            `full`, or all but some matrix products (see `specjax.models.remat`). Results are the same to rounding.
        ema: decay of an exponential moving average of the parameters, which is then evaluated and exported; 0 for none.
        nonfinite: what a loss or gradient that is not finite leads to: `stop`, or `skip`, which drops the update, keeps
            the ids of the rows among the metrics (`train/skipped_rows`) and stops after ten in a row.
        profile: first step, counted from 1, and number of steps that JAX's profiler traces into `profile/` of the run
            directory; empty for none.

    Raises:
        ValueError: a seed that is no uint32, a number below 1, a batch that does not split into its parts, a decay
            outside [0, 1), an unknown `precision`, `remat` or `nonfinite`, or steps to profile that the run does not
            have.
    """

    steps: int
    batch: int
    best: str
    seed: int = 0
    log_every: int = 10
    eval_every: int = 100
    precision: str = "float32"
    accumulate: int = 1
    remat: str = "none"
    ema: float = 0.0
    nonfinite: str = "stop"
    profile: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name in ("steps", "batch", "log_every", "eval_every"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value}: expected at least 1")
        if self.accumulate < 1 or self.batch % self.accumulate:
            raise ValueError(f"accumulate={self.accumulate}: expected a divisor of batch={self.batch}")
        check_remat(self.remat)
        check_precision(self.precision)
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema={self.ema}: expected 0 for none, or a decay below 1")
        if self.nonfinite not in ("stop", "skip"):
            raise ValueError(f"nonfinite={self.nonfinite!r}: expected 'stop' or 'skip'")
        if self.profile and not (
            len(self.profile) == 2 and min(self.profile) >= 1 and sum(self.profile) - 1 <= self.steps
        ):
            raise ValueError(
                f"profile={self.profile}: expected (first step, number of steps) within the {self.steps} steps of the "
                "run, counted from 1, or () for none"
            )


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
        on_policy: the draft as a writer of part of the rows; None where all are those of `train`.
        measures: further figures of an evaluation, by the name of their set: functions of the parameters.

    Raises:
        ValueError: the learning rate is 0 before the run is at its end.
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
    on_policy: OnPolicy | None = None
    measures: Mapping[str, Callable[[Any], dict[str, float]]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.on_policy is not None and (self.online is None or self.placement is not None):
            raise ValueError(
                "on-policy text has no hidden-state store, and is written on one device: set data.online=True and a "
                "mesh of one device, or data.on_policy.share=0"
            )
        o, steps = self.optimizer, self.config.steps
        if steps > o.steps and ends_at_0(o):
            raise ValueError(
                f"train.steps={steps}, but the {o.schedule} schedule comes down to a learning rate of 0 at "
                f"optimizer.steps={o.steps}, and nothing more would be learnt: set optimizer.steps={steps}, or, for a "
                "new run, optimizer.schedule='constant'"
            )

    def init(self, params: Any | None = None) -> TrainState:
        """The state at step 0; `params` replaces the objective's own start."""
        return self._init(self.target.params, self.tables, params)

    def _init(self, target_params: Any, tables: Any, params: Any | None) -> TrainState:
        key = jax.random.key(self.config.seed)
        target = merge(self.target.graph, target_params)
        start = as_kept(self.objective.init(key, target, tables) if params is None else params)
        if self.placement is not None:
            start = self.placement.hold_drafter(start)
        opt_state = make_optimizer(self.optimizer).init(start)
        # A copy: the state is donated, and no buffer can be given away twice.
        average = jax.tree.map(jnp.copy, start) if self.config.ema else None
        return TrainState(params=start, opt_state=opt_state, step=jnp.zeros((), jnp.int32), average=average)

    def load(self, source: Source, rows: np.ndarray) -> Batch:
        """Rows of a source, filled up to a whole batch with empty ones, where the step expects them."""
        return feed.load(source, rows, self.config.batch, self.placement)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update; the state is consumed."""
        return update(self._statics, state, self.target.params, self.tables, batch)

    def lower(self, batch: Any) -> jax.stages.Lowered:
        """The update, lowered for a batch of abstract arrays, to be compiled for devices that may not be here."""
        return update.lower(self._statics, self._abstract(), self.target.params, self.tables, batch)

    def flops(self, batch: Any) -> StepFlops:
        """Operations of an update on such a batch; what is computed twice counts once.

        Raises:
            ValueError: they cannot be counted, see `step_flops`.
        """
        traced = update.trace(
            dataclasses.replace(self._statics, remat="none"), self._abstract(), self.target.params, self.tables, batch
        )
        return step_flops(traced.jaxpr)

    def evaluate(self, params: Any) -> dict[str, float]:
        """`<set>/<metric>` over all rows of every held-out set, each position counted once; and the measures'."""
        results: dict[str, float] = {}
        for name, source in self.held_out.items():
            totals: dict[str, np.ndarray] = {}
            for first in range(0, source.rows, self.config.batch):
                rows = np.arange(first, min(first + self.config.batch, source.rows))
                batch = self.load(source, rows)
                loss = evaluate(self._statics, params, self.target.params, self.tables, batch)
                parts = {"loss": (loss.sum, loss.weight), **loss.metrics}
                for key, part in parts.items():
                    totals[key] = totals.get(key, np.zeros(2)) + np.asarray(part, np.float64)
            results |= {f"{name}/{key}": float(a / b) if b else math.nan for key, (a, b) in totals.items()}
        for name, measure in self.measures.items():
            results |= {f"{name}/{key}": value for key, value in measure(params).items()}
        return results

    def run(
        self,
        workdir: str | epath.Path,
        config: Mapping[str, Any],
        *,
        init: Callable[[], Any] | None = None,
        sinks: Sequence[Sink] = (),
        report: Callable[[int, dict[str, float]], None] = lambda step, values: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> TrainState:
        """Trains to the last step, from the newest checkpoint of the directory where there is one.

        Args:
            workdir: run directory, local or gs://.
            config: what the run is, recorded and compared on resume.
            init: gives the parameters to start from; only called for a fresh run.
            sinks: further places for the metrics, which get them before each checkpoint.
            report: called with step and metrics at every logged step and evaluation.
            stop: asked after every step; True of any process saves, without an evaluation, and ends early.

        Raises:
            ValueError: the directory belongs to another config, target, tokenizer or data.
            FloatingPointError: a loss or gradient is not finite; names the step and the rows of its batch.
            OSError: a checkpoint cannot be written or read; names the last good one.
        """
        run = self.claim(workdir, config)
        checkpoints = Checkpoints(run.checkpoints, self.config.best)
        with self._active():
            return self._run(run, config, checkpoints, init, sinks, report, stop)

    def claim(self, workdir: str | epath.Path, config: Mapping[str, Any]) -> RunDirectory:
        """Checks that the run can be trained, and makes the directory its own, or checks that it is; see `run`.

        `run` does so by itself. Call it before anything else touches the directory, a tracker of metrics for one.

        Raises:
            ValueError: the batch is larger than the data or is not divisible by the mesh, no position of the rows to
                train on or of a held-out set carries loss, `best` names no held-out set or no figure of it, a path of
                the optimizer's rates no parameter, or the directory belongs to another config, target, tokenizer or
                data.
        """
        self._check()
        run = RunDirectory(workdir)
        if jax.process_index() == 0:
            made_for = target_identity(self.target, run.made_for()) | data_identity(self.train.rows, self.tables)
            run.claim(config, free=self._free(run), made_for=made_for)
        return run

    def _check(self) -> None:
        """What only a run needs, before anything is compiled."""
        c = self.config
        feed.batch_rows(self.train.rows, c.batch, c.seed, 0)
        name = c.best.partition("/")[0]
        if name not in (sets := (*self.held_out, *self.measures)):
            known = ", ".join(sets) or "none"
            raise ValueError(f"best={c.best!r} names no held-out set; expected <set>/<metric>, of the sets {known}")
        if self.placement is not None:
            batch_shardings(jax.ShapeDtypeStruct((c.batch,), jnp.int32), self.placement.mesh)
        feed.check_loss(self.train, "the rows to train on")
        for held_out, source in self.held_out.items():
            feed.check_loss(source, f"the held-out set {held_out!r}")
        with self._active():
            start = self._abstract()  # Here the optimizer meets the parameters that its rates name.
            if name in self.held_out and c.best not in (figures := self._figures(name, start.params)):
                raise ValueError(f"best={c.best!r} names no figure of {name!r}; it has {', '.join(figures)}")

    def _figures(self, name: str, params: Any) -> list[str]:
        """What an evaluation of a held-out set is going to give; traced, not computed."""
        batch = self.load(self.held_out[name], np.arange(min(self.config.batch, self.held_out[name].rows)))
        loss = evaluate.eval_shape(self._statics, params, self.target.params, self.tables, batch)
        return [f"{name}/{key}" for key in ("loss", *loss.metrics)]

    def _active(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.placement is None else self.placement.active()

    def _free(self, run: RunDirectory) -> tuple[str, ...]:
        """Fields that may differ: also the end of the schedule, for a run that goes on beyond it."""
        planned = run.config().get("optimizer", {}).get("steps", math.inf) if run.claimed else math.inf
        return (*FREE, "optimizer.steps") if self.config.steps > planned else FREE

    def _run(
        self,
        run: RunDirectory,
        config: Mapping[str, Any],
        checkpoints: Checkpoints,
        init: Callable[[], Any] | None,
        sinks: Sequence[Sink],
        report: Callable[[int, dict[str, float]], None],
        stop: Callable[[], bool],
    ) -> TrainState:
        try:
            state = checkpoints.restore(self._abstract())
            if state is None:
                state = self._place(self.init(init() if init is not None else None))
                if jax.process_index() == 0:
                    run.check_own(config, self._free(run))
                self._save(checkpoints, run.writer(-1, sinks), state, report)
            return self._loop(run, checkpoints, state, sinks, report, stop)
        finally:
            checkpoints.close()

    def _flops_and_peak(self, batch: Batch) -> tuple[StepFlops | None, float | None]:
        """Of an update, and of all devices a second; not counted where the devices are of no known kind."""
        devices = jax.local_devices()[:1] if self.placement is None else list(self.placement.mesh.devices.flat)
        if (peak := peak_flops(devices[0])) is None:
            return None, None
        try:
            return self.flops(batch), peak * len(devices)
        except ValueError as error:
            warnings.warn(f"no MFU is given: {error}", stacklevel=2)
            return None, None

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
    def _statics(self) -> Statics:
        c = self.config
        return Statics(
            self.target.graph,
            self.objective,
            self.optimizer,
            self.placement,
            self.online,
            precision=c.precision,
            seed=c.seed,
            accumulate=c.accumulate,
            ema=c.ema,
            remat=c.remat,
        )

    def _loop(
        self,
        run: RunDirectory,
        checkpoints: Checkpoints,
        state: TrainState,
        sinks: Sequence[Sink],
        report: Callable[[int, dict[str, float]], None],
        stop: Callable[[], bool],
    ) -> TrainState:
        c, start = self.config, int(state.step)
        writer, schedule = run.writer(start, sinks), make_schedule(self.optimizer)
        guard = Guard(c.nonfinite, writer, lambda: checkpoints.latest)
        batches = feed.feed(self.train, c.batch, c.seed, start, c.steps, self.placement)
        pace: Pace | None = None
        mixer = None if self.on_policy is None else Mixer(self.on_policy, run.path / FOLDER, c.seed)
        agreement = Agreement(None if self.placement is None else self.placement.mesh)
        with contextlib.closing(StepTrace(c.profile, run.profile)) as trace:
            for done, (rows, batch) in enumerate(batches, start + 1):
                if mixer is not None:
                    at = (done - 1, start, state.params, self.objective, self.target, self.tables)
                    rows, batch = mixer.mixed(*at, rows, batch)
                trace.before(done)
                with jax.profiler.StepTraceAnnotation("train", step_num=done):
                    state, metrics = self.step(state, batch)
                trace.after(done, metrics)
                guard.saw(done, rows, metrics)
                if pace is None:
                    jax.block_until_ready(metrics)
                    pace = Pace(done, c.steps, *self._flops_and_peak(batch))
                logging, saving = done % c.log_every == 0, done % c.eval_every == 0
                finished, interrupted = done == c.steps, agreement.ask(stop())
                ending = finished or interrupted
                if not (logging or saving or ending):
                    continue
                good = guard.check()
                if good and (logging or ending):
                    last, metrics = good[-1]
                    values = {f"train/{key}": float(value) for key, value in metrics.items() if key != "finite"}
                    values["train/learning_rate"] = float(schedule(last - 1))
                    values |= {f"train/{key}": value for key, value in pace.figures(good, batch.tokens.shape).items()}
                    writer.write(last, **values)
                    report(last, values)
                if saving or finished:
                    self._save(checkpoints, writer, state, report)
                elif interrupted:  # What is left of the time is for the checkpoint, not for held-out rows.
                    writer.flush()
                    checkpoints.save(done, state, None)
                pace.resume()
                if ending:
                    break
        return state

    def _save(
        self,
        checkpoints: Checkpoints,
        writer: MetricsWriter,
        state: TrainState,
        report: Callable[[int, dict[str, float]], None],
    ) -> None:
        step, values = int(state.step), self.evaluate(state.evaluated)
        writer.write(step, **values)
        report(step, values)
        # In this order: metrics ahead of the newest checkpoint are made again, metrics behind it would be lost.
        writer.flush()
        checkpoints.save(step, state, values)
