"""Prompts that a config names. Here the programs read SPECJAX_DATA, the directory of the published sets."""

from __future__ import annotations

import os

import ml_collections
from rich.console import Console

from specjax.evaluation.prompts import Prompt, load_prompts

VARIABLE = "$SPECJAX_DATA"


def prompts_from_config(config: ml_collections.ConfigDict, console: Console) -> tuple[Prompt, ...]:
    """The prompts of `config.prompts`, or of `config.prompts_fallback` where it needs data that are not there.

    Args:
        config: its `prompts` is what `load_prompts` takes, with `$SPECJAX_DATA` for that directory;
            `prompts_per_category` is 0 for all; `max_prompts` likewise.
        console: is told when the fallback is taken.

    Raises:
        ValueError: unknown prompts, a limit below 0, or the data are needed and not named.
    """
    source = config.prompts
    if needs_data(source) and config.prompts_fallback:
        console.print(f"SPECJAX_DATA is not set: prompts={config.prompts_fallback!r} in place of {source!r}")
        source = config.prompts_fallback
    if config.max_prompts < 0:
        raise ValueError(f"max_prompts={config.max_prompts}; expected 0 for all, or a positive number")
    prompts = load(source, config.prompts_per_category)
    return prompts[: config.max_prompts] if config.max_prompts else prompts


def load_groups(config: ml_collections.ConfigDict, console: Console) -> dict[str, tuple[Prompt, ...]]:
    """The groups of `config.prompts`, each with `source` and `per_category`; those without data are left out.

    Raises:
        ValueError: as above, or no group is left.
    """
    groups = {}
    for name, part in config.prompts.items():
        if needs_data(part.source):
            console.print(f"SPECJAX_DATA is not set: the prompts {name!r} are left out", style="yellow")
        else:
            groups[name] = load(part.source, part.per_category)
    if not groups:
        raise ValueError("no prompts are left: set SPECJAX_DATA to the directory of the evaluation sets")
    return groups


def needs_data(source: str) -> bool:
    """Whether a source lies in the directory of SPECJAX_DATA, and that is not set."""
    return VARIABLE in source and not os.environ.get("SPECJAX_DATA")


def load(source: str, per_category: int) -> tuple[Prompt, ...]:
    """Prompts of one source; `per_category` 0 for all."""
    if needs_data(source):
        raise ValueError(f"prompts={source!r} needs SPECJAX_DATA: set it to the directory of the evaluation sets")
    if per_category < 0:
        raise ValueError(f"{per_category} prompts a category; expected 0 for all, or a positive number")
    return load_prompts(source.replace(VARIABLE, os.environ.get("SPECJAX_DATA", "")), per_category or None)
