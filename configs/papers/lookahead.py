"""Fu et al. 2024, Lookahead decoding (arXiv:2402.02057): window W, n-gram length N, guesses G.

    python -m experiments.benchmark --config=configs/papers/lookahead.py:llama2_7b --workdir=runs/lookahead_paper

`llama2_7b`: Llama-2-7B-Chat on MT-bench (one A100, batch 1). `small`: SmolLM2, where wide passes are dear; one of W, N
and G at a time is moved from 5, 3, 5. Rows marked `own` take no n-grams from the text, only those of the window.
"""

from typing import Any

from ml_collections import config_dict

from configs.papers import _base

# Window W, n-gram length N, guesses G.
PUBLISHED_SHAPES = ((15, 5, 15), (7, 5, 7), (1, 5, 30))
SMALL_SHAPES = ((5, 3, 5), (1, 3, 5), (3, 3, 5), (10, 3, 5), (5, 2, 5), (5, 4, 5), (5, 3, 1), (5, 3, 10))
# Those that are also measured without n-grams of the prompt.
PUBLISHED_OWN = ((1, 5, 30),)
SMALL_OWN = ((5, 3, 5), (1, 3, 5))

# Speedups that the paper states; its ablation with N = 5, W = 1, G = 30 and no lookup in the prompt: 1.04.
PUBLISHED = {"greedy": (1.5, 2.3), "sampling": (1.46, 1.60)}


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    setting = _base.choose(arg, ("llama2_7b", "small"), "lookahead")
    large = setting == "llama2_7b"
    shapes, own = (PUBLISHED_SHAPES, PUBLISHED_OWN) if large else (SMALL_SHAPES, SMALL_OWN)
    rows = {label(*shape): row(*shape) for shape in shapes}
    rows |= {f"{label(*shape)} own": {**row(*shape), "pool_from_prompt": False} for shape in own}
    if large:
        return _base.published("meta-llama/Llama-2-7b-chat-hf", rows, PUBLISHED, temperatures=(0.0, 1.0))
    return _base.small(rows, PUBLISHED, prompts_per_category=1)


def label(window: int, ngram: int, guesses: int) -> str:
    """A row's name."""
    return f"W{window} N{ngram} G{guesses}"


def row(window: int, ngram: int, guesses: int) -> dict[str, Any]:
    """A row's drafter."""
    return {"name": "lookahead", "window": window, "ngram": ngram, "guesses": guesses}
