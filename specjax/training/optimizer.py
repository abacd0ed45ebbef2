"""Optimizers from a description: those of Optax by name, with warmup and decay, clipped by global norm."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import optax
import optax.contrib

SCHEDULES: dict[str, Callable[[OptimizerConfig], optax.Schedule]] = {
    "constant": lambda c: optax.constant_schedule(c.learning_rate),
    "cosine": lambda c: optax.cosine_decay_schedule(c.learning_rate, max(c.steps - c.warmup, 1), c.final_fraction),
    "linear": lambda c: optax.linear_schedule(
        c.learning_rate, c.learning_rate * c.final_fraction, max(c.steps - c.warmup, 1)
    ),
}
# name -> what it makes of a description; each decays matrices only.
OPTIMIZERS: dict[str, Callable[[OptimizerConfig], optax.GradientTransformation]] = {
    "adamw": lambda c: optax.adamw(
        make_schedule(c), b1=c.b1, b2=c.b2, weight_decay=c.weight_decay, mask=lambda params: _matrices(params)
    ),
    # optax.adafactor decays by the same share however small the learning rate is; this decays as the others do.
    "adafactor": lambda c: optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.add_decayed_weights(c.weight_decay, mask=lambda params: _matrices(params)),
        optax.scale_by_learning_rate(make_schedule(c)),
    ),
    "lion": lambda c: optax.lion(
        make_schedule(c), b1=c.b1, b2=c.b2, weight_decay=c.weight_decay, mask=lambda params: _matrices(params)
    ),
    "muon": lambda c: optax.contrib.muon(
        make_schedule(c),
        beta=c.b2,
        weight_decay=c.weight_decay,
        weight_decay_mask=lambda params: _matrices(params),
        adam_b1=c.b1,
        adam_b2=c.b2,
    ),
    "sgd": lambda c: optax.chain(
        optax.add_decayed_weights(c.weight_decay, mask=lambda params: _matrices(params)),
        optax.sgd(make_schedule(c), momentum=c.b1 or None),
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """What updates parameters.

    Attributes:
        name: a key of `OPTIMIZERS`.
        learning_rate: peak.
        schedule: after the warmup: `constant`, `cosine` or `linear`.
        steps: at which the schedule ends.
        warmup: steps of linear rise from 0.
        final_fraction: of the peak, at the end of a decaying schedule.
        b1: decay of the first moment; the momentum of `sgd`, 0 for none. `adafactor` has none.
        b2: decay of the second; of `lion`'s and `muon`'s momentum.
        weight_decay: on matrices only.
        clip: of the gradient's global norm; 0 for none.
        rates: pairs of a parameter path's beginning, such as `lm_head` or `layers/0`, and the factor on the learning
            rate of what lies there, 0 to freeze it; the first that fits counts, 1 where none does.

    Raises:
        ValueError: an unknown name or schedule, a number that is not finite or out of range, or pairs that are none.
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
    rates: tuple[tuple[str, float], ...] = ()
    name: str = "adamw"

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ValueError(f"optimizer {self.name!r} is unknown; expected {', '.join(OPTIMIZERS)}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule {self.schedule!r} is unknown; expected {', '.join(SCHEDULES)}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate={self.learning_rate}; expected a finite number above 0")
        for name in ("weight_decay", "clip"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name}={value}; expected a finite number of 0 or more, 0 for none")
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(f"final_fraction={self.final_fraction}; expected a share of the peak, from 0 to 1")
        for name in ("b1", "b2"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value}; expected a decay of 0 or more and below 1")
        if not 0 <= self.warmup < self.steps:
            raise ValueError(
                f"warmup={self.warmup} of steps={self.steps}; expected at least 0 and fewer than the steps"
            )
        for pair in self.rates:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and _factor(pair[1])):
                raise ValueError(f"rates: {pair!r}; expected a pair of a path and a factor of 0 or more")


def _factor(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate by step."""
    main = SCHEDULES[config.schedule](config)
    if not config.warmup:
        return main
    rise = optax.linear_schedule(0.0, config.learning_rate, config.warmup)
    return optax.join_schedules([rise, main], [config.warmup])


def ends_at_0(config: OptimizerConfig) -> bool:
    """Whether nothing is learnt any more after the schedule's last step."""
    return config.schedule != "constant" and config.final_fraction == 0


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """The transformation that `config` describes."""
    made = OPTIMIZERS[config.name](config)
    if config.rates:
        made = optax.chain(made, _scale_by_path(config.rates))
    return optax.chain(optax.clip_by_global_norm(config.clip), made) if config.clip else made


def _scale_by_path(rates: tuple[tuple[str, float], ...]) -> optax.GradientTransformation:
    """Multiplies updates by the factor of the first path that fits.

    Raises:
        ValueError: at the start, a path that no parameter has; lists those there are.
    """

    def fits(path: str, start: str) -> bool:
        return path == start or path.startswith(start + "/")

    def init(params: optax.Params) -> optax.EmptyState:
        paths = [_path(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
        for start, _ in rates:
            if not any(fits(path, start) for path in paths):
                raise ValueError(f"rates: no parameter lies at {start!r}; there are {', '.join(paths)}")
        return optax.EmptyState()

    def update(updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None) -> tuple:
        del params

        def scaled(path: tuple, update: jax.Array) -> jax.Array:
            factor = next((f for start, f in rates if fits(_path(path), start)), 1.0)
            return update if factor == 1.0 else update * jax.numpy.asarray(factor, update.dtype)

        return jax.tree_util.tree_map_with_path(scaled, updates), state

    return optax.GradientTransformation(init, update)


def _path(keys: tuple) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys)


def _matrices(params: optax.Params) -> optax.Params:
    """Norm weights and biases are not decayed."""
    return jax.tree.map(lambda x: x.ndim > 1, params)
