"""Cai et al. 2024, Medusa (arXiv:2401.10774): heads on MT-bench, tree against chain, typical against exact.

    python -m experiments.benchmark --config=configs/papers/medusa.py:vicuna7b --workdir=runs/medusa_paper
    python -m experiments.benchmark --config=configs/papers/medusa.py:small --config.rows.chain.source=runs/medusa

`vicuna7b`, `vicuna13b`: the published heads (one A100, batch 1). `small`: heads of one's own on SmolLM2
(configs/medusa.py); rows without a source are left out.
"""

from typing import Any

from ml_collections import config_dict

from configs.papers import _base

SIZES = {"vicuna7b": "7b", "vicuna13b": "13b"}
# Table 1: speedup and tau on MT-bench of Medusa-2; of Medusa-1 (the frozen target that these heads are for) speedups.
PUBLISHED = {"Medusa-2 7B": (2.83, 3.47), "Medusa-2 13B": (2.83, 3.51), "Medusa-1 7B": (2.18,), "Medusa-1 13B": (2.33,)}
# A tree of 9 nodes over three heads, for heads without calibration.
CHOICES = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0))


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    setting = _base.choose(arg, (*SIZES, "small"), "medusa")
    if setting == "small":
        return _base.small(heads("medusa", ""), PUBLISHED, temperatures=(0.0, 0.7))
    size = SIZES[setting]
    rows = heads("medusa", f"FasterDecoding/medusa-vicuna-{size}-v1.3")
    return _base.published(f"lmsys/vicuna-{size}-v1.3", rows, PUBLISHED, temperatures=(0.0, 0.7))


def heads(method: str, source: str) -> dict[str, dict[str, Any]]:
    """A chain, a tree, and the tree under typical acceptance, which is lossy."""
    row = {"name": method, "source": source}
    tree = {**row, "tree": "choices", "choices": CHOICES}
    return {"chain": {**row, "tree": "chain"}, "tree": tree, "typical": {**tree, "rule": "typical", "lossless": False}}
