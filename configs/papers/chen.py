"""Chen et al. 2023, Accelerating LLM decoding with speculative sampling (arXiv:2302.01318): latency by draft length K.

    python -m experiments.benchmark --config=configs/papers/chen.py:small --workdir=runs/chen

Chinchilla 70B and its 4B draft (16 TPU v4, batch 1, K = 4) are not public; `small`, the only setting, sweeps K on
SmolLM2.
"""

from ml_collections import config_dict

from configs.papers import _base

# Table 1: milliseconds a token and speedup; plain decoding takes 14.1 ms, a draft pass 1.8 ms.
PUBLISHED = {"XSum nucleus": (7.52, 1.92), "XSum greedy": (7.00, 2.01), "HumanEval": (5.73, 2.46)}


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    _base.choose(arg, ("small",), "chen")
    rows = {"draft": {"name": "draft_model", "source": _base.DRAFT, "num_nodes": tuple(range(1, 9))}}
    return _base.small(rows, PUBLISHED, temperatures=(0.0, 1.0), prompts_per_category=1)
