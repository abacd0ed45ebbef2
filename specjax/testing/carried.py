"""Registered drafters on a tiny target, with fresh parameters where they have any: what a law can be tested on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoding import Drafter
from specjax.decoding.tree import TreeSpec
from specjax.drafting import DraftModel
from specjax.drafting.draft_tree import DraftTree
from specjax.drafting.eagle import EagleChain
from specjax.drafting.eagle2 import EagleTree
from specjax.drafting.hydra import Hydra
from specjax.drafting.kangaroo import Kangaroo
from specjax.drafting.medusa import Medusa
from specjax.drafting.mtp import MultiToken
from specjax.drafting.other_tokenizer import OtherTokenizer, restrict
from specjax.drafting.redrafter import RecurrentDrafter
from specjax.drafting.registry import DRAFTERS, Drafting
from specjax.drafting.retrieval import Retrieval, store_tables
from specjax.drafting.text_store import index_texts
from specjax.models import ModelConfig, Target, merge
from specjax.models.eagle import Eagle3Config, EagleConfig, draft_layer
from specjax.models.kangaroo import kangaroo_config
from specjax.models.medusa import HydraConfig, MedusaConfig
from specjax.models.mtp import MtpConfig
from specjax.models.redrafter import RedrafterConfig
from specjax.testing.sequences import four_token_target

NODES = 2  # With the bonus as many tokens as certificates tell apart.
TREE = TreeSpec((-1, -1, 0, 0))
EXIT = {"name": "early_exit", "exit_layer": 1, "num_nodes": 2}
SKIP = {"name": "layer_skip", "skip": (0,), "num_nodes": 2}
LOOKUP = {"name": "prompt_lookup", "num_nodes": 2}

# Options of makers that read no file; a method that is named nowhere here is made with its defaults.
OPTIONS: dict[str, Mapping[str, Any]] = {
    "adaptive": {"inner": EXIT, "widths": (0, 1, 2)},
    "early_exit": {"exit_layer": 1, "num_nodes": NODES},
    "ensemble_mixture": {"members": (EXIT, SKIP), "num_nodes": 2},
    "ensemble_proxy": {"members": (EXIT, SKIP), "num_nodes": 2},
    "ensemble_union": {"members": (EXIT, SKIP)},
    "ensemble_vote": {"members": (EXIT, SKIP, LOOKUP)},
    "jacobi": {"num_nodes": NODES},
    "layer_skip": {"skip": (0,), "num_nodes": NODES},
    "lookahead": {"window": 3, "ngram": 3, "guesses": 2, "buckets": 16},
    "prompt_lookup": {"num_nodes": NODES},
    "recycling": {"num_nodes": 4, "candidates": 2},
    "suffix": {"num_nodes": NODES},
    "suffix_tree": {"num_nodes": 4, "depth": NODES, "max_match": 4, "candidates": 8},
}


def _draft_model(target: Target) -> Drafting:
    draft = four_token_target(layers=1, seed=1)
    return Drafting("draft_model", DraftModel(draft.config, num_nodes=NODES), draft.params, {})


def _draft_tree(target: Target) -> Drafting:
    draft = four_token_target(layers=1, seed=1)
    return Drafting("draft_tree", DraftTree(draft.config, TREE), draft.params, {})


def _heads(name: str, drafter: type[Medusa] | type[Hydra], config: Callable[..., Any]) -> Callable[[Target], Drafting]:
    def make(target: Target) -> Drafting:
        c = target.config
        shapes = config(hidden_size=c.hidden_size, vocab_size=c.vocab_size, head_size=c.vocab_size, num_heads=2)
        return fresh(name, drafter(shapes, TREE), target)

    return make


def _layer(target: Target) -> ModelConfig:
    return draft_layer(target.config, intermediate_size=16, head_size=target.config.vocab_size)


def _eagle(target: Target) -> Drafting:
    return fresh("eagle", EagleChain(EagleConfig(layer=_layer(target)), NODES), target)


def _eagle2(target: Target) -> Drafting:
    return fresh("eagle2", EagleTree(EagleConfig(layer=_layer(target)), 5, levels=2, top_k=2), target)


def _eagle3(target: Target) -> Drafting:
    config = Eagle3Config(layer=_layer(target), taps=(0, 1), target_hidden_size=target.config.hidden_size)
    return fresh("eagle3", EagleChain(config, NODES), target)


def _kangaroo(target: Target) -> Drafting:
    return fresh("kangaroo", Kangaroo(kangaroo_config(target.config, 1), NODES, min_confidence=0.3), target)


def _mtp(target: Target) -> Drafting:
    return fresh("mtp", MultiToken(MtpConfig(layer=_layer(target), depth=2, kind="sequential")), target)


def _redrafter(target: Target) -> Drafting:
    width, vocab = target.config.hidden_size, target.config.vocab_size
    config = RedrafterConfig(hidden_size=width, vocab_size=vocab, head_size=vocab, exit_dim=2 * width)
    return fresh("redrafter", RecurrentDrafter(config, NODES, levels=2, beams=2), target)


def _other_tokenizer(target: Target) -> Drafting:
    """Three tokens are shared, under other ids; the fourth is spelt with two."""
    draft = four_token_target(layers=1, seed=1)
    draft_ids = jnp.asarray([2, 0, 1], jnp.int32)
    config, params = restrict(draft.config, draft.params, draft_ids)
    tables = {
        "vocab": jnp.asarray([1, 2, 3], jnp.int32),
        "draft_ids": draft_ids,
        "pieces": jnp.asarray([[3, 1], [2, 0], [0, 0], [1, 0]], jnp.int32),
        "counts": jnp.asarray([2, 1, 1, 1], jnp.int32),
    }
    return Drafting("other_tokenizer", OtherTokenizer(config, NODES), params, tables)


def _retrieval(target: Target) -> Drafting:
    store = index_texts(["abcaabbccabcbacbcabbac"], target.tokenizer)
    return Drafting("retrieval", Retrieval(num_nodes=4, depth=2, min_match=1, candidates=4), {}, store_tables(store))


# Methods whose maker reads trained parameters or a store: name -> the same with fresh ones.
FRESH: dict[str, Callable[[Target], Drafting]] = {
    "draft_model": _draft_model,
    "draft_tree": _draft_tree,
    "eagle": _eagle,
    "eagle2": _eagle2,
    "eagle3": _eagle3,
    "hydra": _heads("hydra", Hydra, HydraConfig),
    "kangaroo": _kangaroo,
    "medusa": _heads("medusa", Medusa, MedusaConfig),
    "mtp": _mtp,
    "other_tokenizer": _other_tokenizer,
    "redrafter": _redrafter,
    "retrieval": _retrieval,
}


def fresh(name: str, drafter: Drafter, target: Target, seed: int = 0) -> Drafting:
    """A drafter with its initial parameters."""
    params, tables = drafter.init_params(jax.random.key(seed), merge(target.graph, target.params))
    return Drafting(name, drafter, params, tables)


def carried(target: Target) -> tuple[dict[str, Drafting], dict[str, str]]:
    """Every registered drafter that can be made for a tiny target without trained weights.

    Args:
        target: such as `four_token_target`.

    Returns:
        The drafters by name, and for each of the others the reason.
    """
    found: dict[str, Drafting] = {}
    left_out: dict[str, str] = {}
    for name, maker in sorted(DRAFTERS.items()):
        try:
            found[name] = FRESH[name](target) if name in FRESH else maker(target, **OPTIONS.get(name, {}))
        except (TypeError, ValueError) as error:
            left_out[name] = str(error)
    return found, left_out
