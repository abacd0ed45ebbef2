"""Optimizers from a description: AdamW with warmup and decay, clipped by global norm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import optax

SCHEDULES: dict[str, Callable[[OptimizerConfig], optax.Schedule]] = {
    "constant": lambda c: optax.constant_schedule(c.learning_rate),
    "cosine": lambda c: optax.cosine_decay_schedule(c.learning_rate, max(c.steps - c.warmup, 1), c.final_fraction),
    "linear": lambda c: optax.linear_schedule(
        c.learning_rate, c.learning_rate * c.final_fraction, max(c.steps - c.warmup, 1)
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW.

    Attributes:
        learning_rate: peak.
        schedule: after the warmup: `constant`, `cosine` or `linear`.
        steps: at which the schedule ends.
        warmup: steps of linear rise from 0.
        final_fraction: of the peak, at the end of a decaying schedule.
        b1: decay of the first moment.
        b2: decay of the second.
        weight_decay: on matrices only.
        clip: of the gradient's global norm; 0 for none.
    """

    learning_rate: float
    steps: int
    schedule: str = "cosine"
    warmup: int = 0
    final_fraction: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.0
    clip: float = 1.0

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule {self.schedule!r} is unknown; expected {', '.join(SCHEDULES)}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate}; expected a number above 0")
        if not 0 <= self.warmup < self.steps:
            raise ValueError(
                f"warmup={self.warmup} of steps={self.steps}; expected at least 0 and fewer than the steps"
            )


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate by step."""
    main = SCHEDULES[config.schedule](config)
    if not config.warmup:
        return main
    rise = optax.linear_schedule(0.0, config.learning_rate, config.warmup)
    return optax.join_schedules([rise, main], [config.warmup])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """The transformation that `config` describes."""
    adamw = optax.adamw(
        make_schedule(config),
        b1=config.b1,
        b2=config.b2,
        weight_decay=config.weight_decay,
        mask=lambda params: _matrices(params),
    )
    return optax.chain(optax.clip_by_global_norm(config.clip), adamw) if config.clip else adamw


def _matrices(params: optax.Params) -> optax.Params:
    """Norm weights and biases are not decayed."""
    return jax.tree.map(lambda x: x.ndim > 1, params)
