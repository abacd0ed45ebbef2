"""Spec-Bench (Xia et al. 2024, arXiv:2401.07851): all 480 prompts in six categories, greedy and at T = 1, batch 1.

    python -m experiments.benchmark --config=configs/spec_bench.py --workdir=runs/spec_bench

Turns are asked one after another, each behind the model's own answers to those before, as the benchmark does. The file
is question.jsonl of its authors, in SPECJAX_DATA/spec_bench.

Arguments, separated by commas:
    quick   10 prompts a category, 60 in all, 64 new tokens
    small   2 prompts a category, 32 new tokens, greedy
"""

from typing import Any

from ml_collections import config_dict

from configs import zoo

ARGUMENTS = ("quick", "small")


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    arguments = [a for a in (arg or "").split(",") if a]
    unknown = [a for a in arguments if a not in ARGUMENTS]
    if unknown:
        raise ValueError(f"unknown argument {unknown[0]!r} of configs/spec_bench.py; known: {', '.join(ARGUMENTS)}")
    small, quick = "small" in arguments, "quick" in arguments
    config = zoo.get_config()
    config.prompts_fallback = ""  # it is Spec-Bench or nothing
    config.prompts_per_category = 2 if small else 10 if quick else 0
    config.max_new_tokens = 32 if small else 64 if quick else 128
    config.temperatures = (0.0,) if small else (0.0, 1.0)
    lengths = 3 if small else (2, 3, 4)  # of chains of a draft model and of EAGLE's heads
    config.rows = {
        **{label: with_lengths(row, lengths) for label, row in config.rows.to_dict().items()},
        "prompt_lookup": {"name": "prompt_lookup", "num_nodes": 3, "max_ngram": 3, "min_ngram": 1},
        "suffix": {"name": "suffix", "num_nodes": 6},
        "recycling": {"name": "recycling", "num_nodes": 12},
        "lookahead": {"name": "lookahead", "window": 3, "ngram": 3, "guesses": 3},
    }
    return config


def with_lengths(row: dict[str, Any], lengths: int | tuple[int, ...]) -> dict[str, Any]:
    """A row with other draft lengths, where it is a chain of any length."""
    chain = row["name"] in ("draft_model", "eagle", "eagle3") and not row.get("levels")
    return {**row, "num_nodes": lengths} if chain else row
