"""Xia et al. 2024, Spec-Bench (arXiv:2401.07851): its leaderboard's methods side by side, on all 480 prompts.

    python -m experiments.benchmark --config=configs/papers/spec_bench.py:vicuna7b --workdir=runs/spec_bench_paper

`vicuna7b`: the models of the leaderboard (one A100, float16 there, batch 1, greedy). `small`:
configs/spec_bench.py:small on SmolLM2, with what the zoo holds.
"""

from ml_collections import config_dict

from configs import spec_bench
from configs.papers import _base
from configs.papers.eagle import TREE
from configs.papers.medusa import TREE_63

# Leaderboard, A100, Vicuna-7B: overall speedup and mean accepted tokens, bonus included.
PUBLISHED = {
    "EAGLE2": (2.36, 4.34),
    "Recycling": (2.22, 2.73),
    "EAGLE": (2.10, 3.58),
    "Hydra": (2.07, 3.26),
    "Medusa": (1.71, 2.31),
    "PLD": (1.66, 1.75),
    "SpS": (1.52, 2.28),
    "REST": (1.48, 1.82),
    "Lookahead": (1.34, 1.64),
}


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    if _base.choose(arg, ("vicuna7b", "small"), "spec_bench") == "small":
        config = spec_bench.get_config("small")
        config.published = PUBLISHED
        return config
    tree = {"tree": "choices", "choices": TREE_63}
    eagle = "yuhuili/EAGLE-Vicuna-7B-v1.3"
    rows = {
        "EAGLE2": {"name": "eagle2", "source": eagle, "num_nodes": 60, "levels": 6, "top_k": 10},
        "EAGLE": {"name": "eagle", "source": eagle, "choices": TREE},
        "Hydra": {"name": "hydra", "source": "ankner/hydra-vicuna-7b-v1.3", **tree},
        "Medusa": {"name": "medusa", "source": "FasterDecoding/medusa-vicuna-7b-v1.3", **tree},
        "SpS": {"name": "draft_model", "source": "double7/vicuna-68m", "num_nodes": 5},
        "Recycling": {"name": "recycling", "num_nodes": 60},
        # Its store of text is not published as such: index one of your own, see `specjax.drafting.retrieval`.
        "REST": {"name": "retrieval", "source": ""},
        "PLD": {"name": "prompt_lookup", "num_nodes": 10, "max_ngram": 3, "min_ngram": 1},
        "Lookahead": {"name": "lookahead", "window": 7, "ngram": 5, "guesses": 7},
    }
    return _base.published("lmsys/vicuna-7b-v1.3", rows, PUBLISHED, prompts=_base.SPEC_BENCH)
