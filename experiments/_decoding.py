"""Decoding with a trained drafter on a few prompts: tau, while it is trained and after."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np
from rich.console import Console

from experiments._prompts import prompts_from_config
from specjax import build
from specjax.checkpoints.drafters import save_drafter
from specjax.decoding import Request, generate, make_sampling
from specjax.drafting.registry import Drafting
from specjax.evaluation.conversations import encode
from specjax.evaluation.prompts import Prompt
from specjax.models import Target
from specjax.training import Objective, Trainer

TAU = "decode"  # The name that the figures go under: decode/tau.


def taus(
    target: Target, drafting: Drafting, prompts: Sequence[Prompt], max_new_tokens: int, seed: int = 0
) -> list[float | None]:
    """Greedy tau of the first turn of each prompt, bonus tokens included; None where no pass was needed."""
    loop, weights = build.make_loop(target, drafting, make_sampling([0.0]))
    requests = [
        Request(encode(target, [{"role": "user", "content": prompt.turns[0]}]), max_new_tokens, id=i)
        for i, prompt in enumerate(prompts)
    ]
    done = generate(loop, weights, requests, context=target.context, vocab=target.config.vocab_size, seed=seed)
    return [c.emitted / c.steps if c.steps else None for c in done]


def measuring(
    target: Target, objective: Objective, tables: Mapping[str, Any], prompts: Sequence[Prompt], max_new_tokens: int
) -> Callable[[Any], dict[str, float]]:
    """A measure of trained parameters: the mean tau of the drafter that they would be saved as."""

    def measure(params: Any) -> dict[str, float]:
        saved = objective.export(params, tables, {})
        with tempfile.TemporaryDirectory() as folder:
            save_drafter(folder, saved, target)
            drafting = build.make_drafter(saved.method, target, source=folder)
        found = [tau for tau in taus(target, drafting, prompts, max_new_tokens) if tau is not None]
        return {"tau": float(np.mean(found))} if found else {}

    return measure


def with_decoding(trainer: Trainer, config: ml_collections.ConfigDict, target: Target, console: Console) -> Trainer:
    """The trainer, which at each evaluation decodes what `config.decoding` says.

    Raises:
        ValueError: unknown prompts, no tokens to decode, or a run on a mesh.
    """
    if "decoding" not in config or not config.decoding.prompts:
        return trainer
    if trainer.placement is not None:
        raise ValueError(
            "decoding.prompts: a run on a mesh does not decode; leave it empty, or use a mesh of one device"
        )
    if config.decoding.max_new_tokens < 2:
        raise ValueError(f"decoding.max_new_tokens={config.decoding.max_new_tokens}; expected at least 2")
    asked = {**config.decoding.to_dict(), "prompts_fallback": "", "max_prompts": 0}
    prompts = prompts_from_config(ml_collections.ConfigDict(asked), console)
    measure = measuring(target, trainer.objective, trainer.tables, prompts, config.decoding.max_new_tokens)
    return dataclasses.replace(trainer, measures={TAU: measure})
