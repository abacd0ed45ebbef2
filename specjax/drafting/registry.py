"""Drafting methods by name. A method is one file beside this one, one maker and one line here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from specjax import checkpoints
from specjax.checkpoints import drafters
from specjax.decoding import Drafter
from specjax.drafting.autoregressive import Autoregressive
from specjax.drafting.draft_model import DraftModel
from specjax.drafting.heads import choose_tree
from specjax.drafting.hydra import Hydra, HydraPlusPlus
from specjax.drafting.medusa import Medusa
from specjax.drafting.mtp import MultiToken
from specjax.drafting.prompt_lookup import PromptLookup
from specjax.models import Target


@dataclasses.dataclass(frozen=True, eq=False)
class Drafting:
    """A drafter with its arrays.

    Attributes:
        name: registry name, for reports.
        drafter: the method.
        params: trained parameters.
        tables: arrays that are not trained.
    """

    name: str
    drafter: Drafter
    params: Any
    tables: Any

    @property
    def param_bytes(self) -> int:
        """Bytes of parameters and tables that the drafter adds to the target."""
        return sum(x.nbytes for x in jax.tree.leaves((self.params, self.tables)))


def _autoregressive(target: Target) -> Drafting:
    del target
    return Drafting("autoregressive", Autoregressive(), {}, {})


def _prompt_lookup(target: Target, **options: Any) -> Drafting:
    del target
    return Drafting("prompt_lookup", PromptLookup(**options), {}, {})


def _draft_model(target: Target, source: str, num_nodes: int = 4) -> Drafting:
    """A zoo entry or saved drafter, or any model that `load_target` reads whose vocabulary is the target's."""
    if drafters.is_drafter(source):
        loaded = drafters.load_drafter(source, target)
        # The shared head is among the parameters by now; the embedding stays the target's.
        drafter = DraftModel(loaded.config, num_nodes, shares=tuple(s for s in loaded.shares if s == "embed"))
        return Drafting("draft_model", drafter, loaded.params, loaded.tables)
    draft = checkpoints.load_target(source, dtype=target.config.dtype)
    mine, theirs = target.tokenizer.fingerprint(), draft.tokenizer.fingerprint()
    if mine != theirs or draft.config.head_size != target.config.head_size:
        raise ValueError(
            f"draft {source!r} and target {target.name!r} do not share a vocabulary (fingerprints {theirs} and {mine}, "
            f"{draft.config.head_size} and {target.config.head_size} ids); choose a draft of the same family"
        )
    return Drafting("draft_model", DraftModel(draft.config, num_nodes), draft.params, {})


def _heads(
    name: str,
    target: Target,
    source: str,
    tree: str = "chain",
    nodes: int = 0,
    choices: Sequence[Sequence[int]] = (),
) -> Drafting:
    """Saved heads with a chain, a calibrated tree of so many nodes, or a tree by its choices (`choose_tree`)."""
    loaded = drafters.load_drafter(source, target)
    if loaded.method != name:
        raise ValueError(f"{source!r} is a head of method {loaded.method!r}, not {name!r}: use its own drafter")
    tables, config = dict(loaded.tables), loaded.config
    shape = choose_tree(config, tables.pop("accuracy", None), tree=tree, nodes=nodes, choices=choices)
    if name == "medusa":
        return Drafting(name, Medusa(config, shape), loaded.params, tables)
    hydra = Hydra if config.prefix is None else HydraPlusPlus
    return Drafting(name, hydra(config, shape), loaded.params, tables)


def _mtp(target: Target, source: str, num_nodes: int = 0) -> Drafting:
    """Heads or modules that were saved for the target; `num_nodes` depths of them, 0 for all."""
    loaded = drafters.load_drafter(source, target)
    if loaded.method != "mtp":
        raise ValueError(f"{source!r} is a drafter of method {loaded.method!r}; expected one of method 'mtp'")
    return Drafting("mtp", MultiToken(loaded.config, num_nodes), loaded.params, loaded.tables)


# name -> maker(target, **options)
DRAFTERS: dict[str, Callable[..., Drafting]] = {
    "autoregressive": _autoregressive,
    "draft_model": _draft_model,
    "hydra": partial(_heads, "hydra"),
    "medusa": partial(_heads, "medusa"),
    "mtp": _mtp,
    "prompt_lookup": _prompt_lookup,
}
