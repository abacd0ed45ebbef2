"""Models, objectives and drafters from shapes alone, for programs that compile or plan without weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from specjax import build
from specjax.decoding import Drafter
from specjax.decoding.tree import TreeSpec, from_branching
from specjax.drafting import Autoregressive, DraftModel, DraftTree, PromptLookup
from specjax.drafting.eagle import EagleChain
from specjax.drafting.eagle2 import EagleTree
from specjax.drafting.early_exit import EarlyExit
from specjax.drafting.ensemble import EnsembleMixture, EnsembleProxy, EnsembleUnion, EnsembleVote
from specjax.drafting.ensemble.members import Members
from specjax.drafting.hydra import Hydra
from specjax.drafting.jacobi import Jacobi
from specjax.drafting.kangaroo import Kangaroo
from specjax.drafting.layer_skip import LayerSkip
from specjax.drafting.lookahead import Lookahead
from specjax.drafting.medusa import Medusa
from specjax.drafting.mtp import MultiToken
from specjax.drafting.recycling import Recycling
from specjax.drafting.redrafter import RecurrentDrafter
from specjax.drafting.registry import DRAFTERS
from specjax.drafting.suffix import Suffix
from specjax.drafting.suffix_tree import SuffixTree
from specjax.models import ModelConfig, Target, graph
from specjax.models.eagle import EagleConfig, draft_layer
from specjax.models.kangaroo import kangaroo_config
from specjax.models.medusa import HydraConfig, MedusaConfig
from specjax.models.mtp import MtpConfig
from specjax.models.published import published_config
from specjax.models.redrafter import RedrafterConfig
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
    """The drafter that a config names, made from shapes alone.

    Args:
        options: `name` and the drafter's own. A `draft_model` has the shapes of the published `model`, an `eagle3`
            those of the objective, with `topology` (`chain`, `tree`) and what that takes; heads and EAGLE-1 have the
            target's widths and vocabulary; an ensemble has `members`, each such options.
        target: to draft for.
        objective: whose network `eagle3` decodes with.

    Raises:
        ValueError: one that cannot be made without weights or a text, or that does not take these options.
    """
    options = dict(options)
    name = options.pop("name")
    shape = target.config
    try:
        if name == "eagle3":
            made = {"chain": EagleChain, "tree": EagleTree}[options.pop("topology", "chain")]
            return made(objective.config, **options)
        if name in ENSEMBLES:
            members = tuple(decode_drafter(member, target, objective) for member in options.pop("members"))
            return ENSEMBLES[name](Members(members), **options)
        if name in TRAINED:
            return TRAINED[name](shape, **options)
        if name in UNTRAINED:
            return UNTRAINED[name](**options)
    except (KeyError, TypeError) as error:
        raise ValueError(f"drafter {name!r} does not take these options ({options}): {error}") from error
    known = ", ".join(sorted({"eagle3", *ENSEMBLES, *TRAINED, *UNTRAINED}))
    also = " (it needs trained weights, or a text)" if name in DRAFTERS else ""
    raise ValueError(f"drafter {name!r} cannot be made from shapes alone{also}; expected one of {known}")


UNTRAINED: dict[str, Callable[..., Drafter]] = {
    "autoregressive": Autoregressive,
    "early_exit": EarlyExit,
    "jacobi": Jacobi,
    "layer_skip": LayerSkip,
    "lookahead": Lookahead,
    "prompt_lookup": PromptLookup,
    "recycling": Recycling,
    "suffix": Suffix,
    "suffix_tree": SuffixTree,
}
ENSEMBLES: dict[str, Callable[..., Drafter]] = {
    "ensemble_mixture": EnsembleMixture,
    "ensemble_proxy": EnsembleProxy,
    "ensemble_union": EnsembleUnion,
    "ensemble_vote": EnsembleVote,
}


def _heads(method: Callable[..., Drafter], config: Callable[..., Any], shape: ModelConfig, num_nodes: int) -> Drafter:
    """Heads that draft a chain."""
    tree = TreeSpec(tuple(range(-1, num_nodes - 1)))
    return method(config(num_heads=num_nodes, **_widths(shape)), tree)


def _widths(shape: ModelConfig) -> dict[str, Any]:
    sizes = {name: getattr(shape, name) for name in ("hidden_size", "vocab_size", "final_softcap", "dtype")}
    return {**sizes, "head_size": shape.vocab_size}


def _layer(shape: ModelConfig) -> ModelConfig:
    return draft_layer(shape, intermediate_size=shape.intermediate_size, head_size=shape.vocab_size)


TRAINED: dict[str, Callable[..., Drafter]] = {
    "draft_model": lambda shape, model, **o: DraftModel(published_config(model, shape.dtype), **o),
    "draft_tree": lambda shape, model, branching, **o: DraftTree(
        published_config(model, shape.dtype), from_branching(branching), **o
    ),
    "eagle": lambda shape, **o: EagleChain(EagleConfig(layer=_layer(shape)), **o),
    "eagle2": lambda shape, **o: EagleTree(EagleConfig(layer=_layer(shape)), **o),
    "hydra": lambda shape, num_nodes=4: _heads(Hydra, HydraConfig, shape, num_nodes),
    "kangaroo": lambda shape, exit_layer=2, **o: Kangaroo(kangaroo_config(shape, exit_layer), **o),
    "medusa": lambda shape, num_nodes=4: _heads(Medusa, MedusaConfig, shape, num_nodes),
    "mtp": lambda shape, depth=3: MultiToken(MtpConfig(layer=_layer(shape), depth=depth, kind="sequential")),
    "redrafter": lambda shape, **o: RecurrentDrafter(
        RedrafterConfig(exit_dim=2 * shape.hidden_size, **_widths(shape)), **o
    ),
}


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    """An abstract int32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)
