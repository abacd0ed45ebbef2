"""EAGLE-1 that reads less than it could: what token and feature are each worth (Li et al. 2024, section 5.3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints.drafters import SavedDrafter
from specjax.models import Decoder, Target
from specjax.training.data import Batch
from specjax.training.objectives.base import Loss
from specjax.training.objectives.eagle import EagleRegression
from specjax.training.objectives.registry import OBJECTIVES

READS = ("token", "feature", "both")


@dataclasses.dataclass(frozen=True)
class EagleReading(EagleRegression):
    """`EagleRegression` whose projection sees a part of its input; the rest of its rows stay zero.

    Attributes:
        reads: `token` (the shifted token), `feature`, or `both`, which is EAGLE.
    """

    reads: str = "both"

    def __post_init__(self) -> None:
        if self.reads not in READS:
            raise ValueError(f"reads={self.reads!r}; expected {', '.join(READS)}")

    def loss(self, draft_params: Any, tables: Any, target: Decoder, batch: Batch, key: jax.Array | None) -> Loss:
        """See `EagleRegression`."""
        return super().loss(self._seen(draft_params), tables, target, batch, key)

    def export(self, draft_params: Any, tables: Any, info: Mapping[str, Any]) -> SavedDrafter:
        """An ordinary EAGLE-1 head, with the zeros in it."""
        return super().export(self._seen(draft_params), tables, info)

    def _seen(self, params: Any) -> Any:
        kernel = params["fc"]["kernel"]
        of_token = jnp.arange(kernel.shape[0])[:, None] < self.config.layer.hidden_size
        kept = {"token": of_token, "feature": ~of_token, "both": jnp.ones_like(of_token)}[self.reads]
        return {**params, "fc": {**params["fc"], "kernel": jnp.where(kept, kernel, 0.0)}}


def make(target: Target, reads: str, **options: Any) -> EagleReading:
    """The objective; further options are those of `eagle`."""
    whole = OBJECTIVES["eagle"](target, **options)
    assert isinstance(whole, EagleRegression)
    fields = {field.name: getattr(whole, field.name) for field in dataclasses.fields(whole)}
    return EagleReading(**fields, reads=reads)
