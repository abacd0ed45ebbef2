"""Cai et al. 2024, Medusa (arXiv:2401.10774): heads on MT-bench, tree against chain, typical against exact.

    python -m experiments.benchmark --config=configs/papers/medusa.py:vicuna7b --workdir=runs/medusa_paper
    python -m experiments.benchmark --config=configs/papers/medusa.py:small --config.rows.chain.source=runs/medusa

`vicuna7b`, `vicuna13b`: the published heads (one A100, batch 1). `small`: the zoo's heads on SmolLM2, or one's own
(configs/medusa.py), with fewer of the heads and calibrated trees of two sizes besides; rows without a source are left
out.
"""

from typing import Any

from ml_collections import config_dict

from configs.papers import _base

SIZES = {"vicuna7b": "7b", "vicuna13b": "13b"}
# Table 1: speedup and tau on MT-bench of Medusa-2; of Medusa-1 (the frozen target that these heads are for) speedups.
PUBLISHED = {"Medusa-2 7B": (2.83, 3.47), "Medusa-2 13B": (2.83, 3.51), "Medusa-1 7B": (2.18,), "Medusa-1 13B": (2.33,)}
# The 63 nodes of their code (`mc_sim_7b_63`), which Hydra takes too.
TREE_63 = _base.tree(
    {
        (): 10, (0,): 10, (1,): 7, (2,): 3, (3,): 2, (4,): 1, (5,): 1, (6,): 1, (7,): 1, (8,): 1, (9,): 1,
        (0, 0): 10, (0, 1): 3, (0, 2): 2, (0, 3): 1, (0, 4): 1, (0, 5): 1, (0, 6): 1, (0, 7): 1, (1, 0): 2, (2, 0): 1,
        (0, 0, 0): 2,
    }
)  # fmt: skip
# 9 nodes over three heads, where a pass over 64 tokens is dear.
CHOICES = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0))


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    setting = _base.choose(arg, (*SIZES, "small"), "medusa")
    if setting == "small":
        source = _base.head("medusa")
        rows = heads("medusa", source, CHOICES) | sizes("medusa", source)
        return _base.small(rows, PUBLISHED, temperatures=(0.0, 0.7), prompts_per_category=1)
    size = SIZES[setting]
    rows = heads("medusa", f"FasterDecoding/medusa-vicuna-{size}-v1.3", TREE_63)
    return _base.published(f"lmsys/vicuna-{size}-v1.3", rows, PUBLISHED, temperatures=(0.0, 0.7))


def heads(method: str, source: str, choices: tuple[tuple[int, ...], ...]) -> dict[str, dict[str, Any]]:
    """A chain, a tree, and the tree under typical acceptance, which is lossy."""
    row = {"name": method, "source": source}
    tree = {**row, "tree": "choices", "choices": choices}
    return {"chain": {**row, "tree": "chain"}, "tree": tree, "typical": {**tree, "rule": "typical", "lossless": False}}


def sizes(method: str, source: str) -> dict[str, dict[str, Any]]:
    """Chains of one and two heads, and calibrated trees of 4 and 16 nodes."""
    row = {"name": method, "source": source}
    chains = {f"chain{n}": {**row, "tree": "chain", "nodes": n} for n in (1, 2)}
    return chains | {f"sparse{n}": {**row, "tree": "calibrated", "nodes": n} for n in (4, 16)}
