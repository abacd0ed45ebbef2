"""One update and one evaluation, jitted over plain pytrees; the state is donated."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from specjax.models import Decoder, Tap, merge
from specjax.models.remat import rematerialised
from specjax.parallel import Placement
from specjax.training.data import Batch
from specjax.training.objectives.base import Counted, Loss, Objective
from specjax.training.online import with_hidden_states
from specjax.training.optimizer import OptimizerConfig, make_optimizer


@flax.struct.dataclass
class TrainState:
    """All that changes in training.

    Attributes:
        params: trainable parameters, in float32 whatever they are computed in.
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


@dataclasses.dataclass(frozen=True)
class Statics:
    """The hashable part of a compiled step; the fields are the trainer's."""

    graph: Any
    objective: Objective
    optimizer: OptimizerConfig
    placement: Placement | None
    online: tuple[Tap, ...] | None
    precision: str
    seed: int
    accumulate: int
    ema: float
    remat: str = "none"

    def loss(self, params: Any, target_params: Any, tables: Any, batch: Batch, key: jax.Array | None) -> Loss:
        """The objective's, with the target's hidden states computed here where the rows lack them."""
        with jax.default_matmul_precision(self.precision), rematerialised(self.remat):
            target = merge(self.graph, target_params)
            params = as_computed(self.objective, params, target, tables)
            if self.online is not None:
                batch = with_hidden_states(target, batch, self.online)
            return self.objective.loss(params, tables, target, batch, key)


def as_kept(params: Any) -> Any:
    """Trained parameters as training keeps them, floats in float32, whatever they are computed in.

    In bfloat16 an update below 1/256 of a weight would be rounded away.
    """
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)


def as_computed(objective: Objective, params: Any, target: Decoder, tables: Any) -> Any:
    """Kept parameters in the dtypes that the objective's own start has, which it computes in."""
    start = jax.eval_shape(lambda key: objective.init(key, target, tables), jax.random.key(0))
    return jax.tree.map(lambda x, like: x.astype(like.dtype), params, start)


@functools.partial(jax.jit, static_argnames=("statics",), donate_argnames=("state",))
def update(
    statics: Statics, state: TrainState, target_params: Any, tables: Any, batch: Batch
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update, and its metrics.

    Where loss or gradient is not finite, everything but the step count stays as it was, and `finite` says so.
    """
    key = jax.random.fold_in(jax.random.key(statics.seed), state.step)
    tables = {**tables, "step": state.step}
    if isinstance(statics.objective, Counted):
        tables["counts"] = statics.objective.counts(tables, batch)

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
    # Counted as they are, whatever an objective's weight means by a position.
    metrics |= {"loss_positions": jnp.sum(batch.predicts), "input_tokens": jnp.sum(batch.segments > 0)}
    metrics["finite"] = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    new = TrainState(params=params, opt_state=opt_state, step=state.step, average=average)
    new = jax.tree.map(lambda a, b: jnp.where(metrics["finite"], a, b), new, state)
    new = dataclasses.replace(new, step=state.step + 1)
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
def evaluate(statics: Statics, params: Any, target_params: Any, tables: Any, batch: Batch) -> Loss:
    """The loss of held-out rows, without randomness."""
    return statics.loss(params, target_params, tables, batch, None)
