"""Fu et al. 2024, Lookahead decoding (arXiv:2402.02057): window W, n-gram length N, guesses G.

    python -m experiments.benchmark --config=configs/papers/lookahead.py:llama2_7b --workdir=runs/lookahead_paper

`llama2_7b`: Llama-2-7B-Chat on MT-bench (one A100, batch 1). `small`: SmolLM2, where wide passes are dear.
"""

from ml_collections import config_dict

from configs.papers import _base

# Speedups that the paper states; its ablation with N = 5, W = 1, G = 30 and no lookup in the prompt: 1.04.
PUBLISHED = {"greedy": (1.5, 2.3), "sampling": (1.46, 1.60)}


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    setting = _base.choose(arg, ("llama2_7b", "small"), "lookahead")
    shapes = ((15, 5, 15), (7, 5, 7), (1, 5, 30)) if setting == "llama2_7b" else ((3, 3, 3), (5, 3, 5), (1, 3, 5))
    rows = {
        f"W{window} N{ngram} G{guesses}": {"name": "lookahead", "window": window, "ngram": ngram, "guesses": guesses}
        for window, ngram, guesses in shapes
    }
    if setting == "llama2_7b":
        return _base.published("meta-llama/Llama-2-7b-chat-hf", rows, PUBLISHED, temperatures=(0.0, 1.0))
    return _base.small(rows, PUBLISHED)
