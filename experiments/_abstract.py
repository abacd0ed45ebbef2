"""Models, objectives and drafters from shapes alone, for programs that compile or plan without weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from specjax import build
from specjax.decoding import Drafter
from specjax.drafting import Autoregressive, DraftModel, PromptLookup
from specjax.drafting.eagle import EagleChain
from specjax.drafting.eagle2 import EagleTree
from specjax.drafting.registry import DRAFTERS
from specjax.models import Target, graph
from specjax.models.published import published_config
from specjax.models.target import config_hash
from specjax.training.objectives.registry import OBJECTIVES


def abstract_target(model: str, dtype: str) -> Target:
    """A published model without weights and without a tokenizer."""
    shapes = published_config(model, dtype)
    static, params = graph(shapes)
    tokenizer: Any = None
    return Target(shapes, static, params, tokenizer, model, config_hash(shapes), (0,), shapes.max_position)


def objective_of(config: ml_collections.ConfigDict, target: Target) -> Any:
    """The objective that a config names, for this target."""
    options = config.objective.to_dict()
    return build.lookup(OBJECTIVES, options.pop("name"), "objective")(target, **options)


def decode_drafter(options: dict[str, Any], target: Target, objective: Any = None) -> Drafter:
    """The drafter that a config names: `draft_model` of the shapes `model`, or `eagle3` of the objective's network.

    Args:
        options: `name` and the drafter's own; for `eagle3` `topology` (`chain`, `tree`) and what that takes.
        target: to draft for.
        objective: whose head is decoded with.

    Raises:
        ValueError: one that cannot be made without weights.
    """
    name = options.pop("name")
    if name == "draft_model":
        return DraftModel(published_config(options.pop("model"), target.config.dtype), **options)
    if name == "eagle3":
        made = {"chain": EagleChain, "tree": EagleTree}[options.pop("topology", "chain")]
        return made(objective.config, **options)
    if name in ("autoregressive", "prompt_lookup"):
        return {"autoregressive": Autoregressive, "prompt_lookup": PromptLookup}[name](**options)
    known = "autoregressive, draft_model, eagle3, prompt_lookup"
    also = " (it needs trained weights)" if name in DRAFTERS else ""
    raise ValueError(f"drafter {name!r} cannot be made from shapes alone{also}; expected one of {known}")


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    """An abstract int32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)
