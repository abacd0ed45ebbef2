"""A drafter by its name: what its maker takes, and whether what it made can be used."""

from __future__ import annotations

import dataclasses
import inspect
import numbers
from typing import Any

from specjax.decoding.tree import MAX_DEPTH, MAX_NODES
from specjax.drafting.autoregressive import Autoregressive
from specjax.drafting.lookup import lookup
from specjax.drafting.registry import DRAFTERS, Drafting, MadeFor, require_drafting
from specjax.models import Target


def taken(maker: Any) -> list[str]:
    """Names of the options that a maker takes; none where it hands them on to who knows what."""
    takes = list(inspect.signature(maker).parameters.values())[1:]
    handed_on = getattr(maker, "handed_on", None)
    if handed_on is None and any(p.kind is p.VAR_KEYWORD for p in takes):
        return []
    own = [p.name for p in takes if p.kind is not p.VAR_KEYWORD]
    return list(dict.fromkeys([*own, *(handed_on or ())]))


def make_drafter(name: str, target: Target, **options: Any) -> Drafting:
    """A registered drafter, or one's own.

    Raises:
        ValueError: unknown name, an option that the maker does not take or that is out of range, or a maker that makes
            no drafter.
    """
    if not isinstance(target, Target):
        raise ValueError(f"the target is {target!r}; expected what load_target returns")
    maker = lookup(DRAFTERS, name, "drafter")
    try:
        signature = inspect.signature(maker)
    except (TypeError, ValueError) as error:  # not callable, or a builtin without one
        raise ValueError(f"drafter {name!r} is {maker!r}; expected a maker(target, **options)") from error
    try:
        signature.bind(target, **options)
        made = maker(target, **options)
    except TypeError as error:
        takes = taken(maker)
        known = f"; it takes ({', '.join(takes)})" if takes else ""
        raise ValueError(f"drafter {name!r} does not take these options ({options}): {error}{known}") from error
    require_drafting(made, name)
    whole = [field.name for field in dataclasses.fields(made.drafter) if field.type == "int"]
    for field in dict.fromkeys(("num_nodes", "num_probes", "depth", *whole)):
        if not isinstance(size := getattr(made.drafter, field), numbers.Integral):
            raise ValueError(f"{field}={size!r} of drafter {name!r}; expected a whole number")
    if (nodes := int(made.drafter.num_nodes)) > MAX_NODES:
        raise ValueError(f"num_nodes={nodes} of drafter {name!r}; expected at most {MAX_NODES}")
    # Plain decoding in passes as wide as a tree's drafts nothing, however many nodes there are.
    if (depth := int(made.drafter.depth)) > MAX_DEPTH and not isinstance(made.drafter, Autoregressive):
        raise ValueError(
            f"drafter {name!r} drafts {depth} tokens deep; expected at most {MAX_DEPTH}: give fewer num_nodes or levels"
        )
    made = dataclasses.replace(made, made_for=MadeFor(target.name, target.config_hash, target.tokenizer))
    return made.placed(target.placement)
