"""What the papers' benchmark configs share: the published setting, and a small one that two cores can run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ml_collections import config_dict

from specjax.checkpoints import drafters

SMOLLM2 = "smollm2"
DRAFT = "smollm2-135m-distilled"
SPEC_BENCH = "spec_bench:$SPECJAX_DATA/spec_bench/question.jsonl"
MT_BENCH = "mt_bench:$SPECJAX_DATA/mt_bench/question.jsonl"
HUMANEVAL = "humaneval:$SPECJAX_DATA/humaneval/HumanEval.jsonl.gz"
PLAIN = {"autoregressive": {"name": "autoregressive"}}

MESH = {"data": 1, "fsdp": 1, "tensor": 1, "target": "fsdp_tp", "drafter": "dp"}

VICUNA = "vicuna"  # its tokenizers have no chat template

Rows = Mapping[str, Mapping[str, Any]]


def tree(children: Mapping[tuple[int, ...], int]) -> tuple[tuple[int, ...], ...]:
    """A static tree by the number of children of each node that has any, the root () among them."""
    paths = [(*node, rank) for node, count in children.items() for rank in range(count)]
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


def head(method: str) -> str:
    """The zoo's entry of a method, for the small settings; empty, which leaves its rows out, where there is none."""
    return next((entry for entry in drafters.zoo_entries() if drafters.saved_method(entry) == method), "")


def choose(arg: str | None, settings: tuple[str, ...], paper: str) -> str:
    """The setting that an argument names; the first by default.

    Raises:
        ValueError: there is no such setting.
    """
    if (arg or settings[0]) not in settings:
        raise ValueError(f"unknown argument {arg!r} of configs/papers/{paper}.py; known: {', '.join(settings)}")
    return arg or settings[0]


def published(target: str, rows: Rows, numbers: Any, **changes: Any) -> config_dict.ConfigDict:
    """A paper's own setting: its models, on one accelerator, greedy, batch 1. Vicuna is asked through its template.

    Args:
        target: hub id.
        rows: drafters by label; plain decoding is added.
        numbers: what the paper prints, kept with the results.
        **changes: further fields.
    """
    fields = {
        "prompts": MT_BENCH,
        "prompts_fallback": "",
        "prompts_per_category": 0,
        "max_new_tokens": 1024,
        "template": VICUNA if "vicuna" in target else "chat",
        "temperatures": (0.0,),
        "layout": "plain",
        "mesh": MESH | {"tensor": -1},
        "precision": "default",
    }
    return _benchmark({"source": target, "dtype": "bfloat16"}, rows, numbers, fields | changes)


def small(rows: Rows, numbers: Any, **changes: Any) -> config_dict.ConfigDict:
    """The same question on SmolLM2-135M-Instruct: 2 prompts of each of Spec-Bench's categories, 48 new tokens.

    Arguments as in `published`. The shipped prompts take Spec-Bench's place where SPECJAX_DATA is not set.
    """
    fields = {
        "prompts": SPEC_BENCH,
        "prompts_fallback": "shipped",
        "prompts_per_category": 2,
        "max_new_tokens": 48,
        "template": "chat",
        "temperatures": (0.0,),
        "layout": "packed",
        "mesh": MESH,
        "precision": "float32",
    }
    return _benchmark({"source": SMOLLM2, "dtype": "float32"}, rows, numbers, fields | changes)


def _benchmark(
    target: Mapping[str, str], rows: Rows, numbers: Any, fields: Mapping[str, Any]
) -> config_dict.ConfigDict:
    config = config_dict.ConfigDict(dict(fields))
    config.target = dict(target)
    config.system_prompt = config_dict.placeholder(str)
    config.max_prompts = 0
    config.long_prompts = "error"
    config.top_k = 0
    config.top_p = 1.0
    config.min_p = 0.0
    config.repetition_penalty = 1.0  # over prompt and answer; 1 is none
    config.presence_penalty = 0.0  # over the answer alone, like the next
    config.frequency_penalty = 0.0
    config.logit_bias = ()  # pairs: ((token id, what to add to its logit), ...)
    config.suppress_tokens = ()  # ids that are never emitted
    config.seed = 0
    config.rows = {**PLAIN, **rows}
    config.only = ()
    config.batch = 1
    config.repeats = 1
    config.near_tie_bound = 0.0
    config.loop_threshold = 0.4
    config.coloured_texts = 0
    config.published = numbers
    return config
