"""Li et al. 2024, EAGLE and EAGLE-2 (arXiv:2401.15077, 2406.16858): one head, as a chain and as a dynamic tree.

    python -m experiments.benchmark --config=configs/papers/eagle.py:vicuna7b --workdir=runs/eagle_paper

`vicuna7b`, `vicuna13b`: the published heads (one A100, batch 1, MT-bench). `small`: a head of one's own on SmolLM2
(configs/eagle.py); give the rows their sources, those without are left out.
"""

from ml_collections import config_dict

from configs.papers import _base

SIZES = {"vicuna7b": ("7b", "7B"), "vicuna13b": ("13b", "13B")}
# MT-bench, greedy: speedup and tau.
PUBLISHED = {
    "EAGLE 7B": (2.90, 3.94),
    "EAGLE 13B": (3.07, 3.98),
    "EAGLE-2 7B": (3.62, 4.98),
    "EAGLE-2 13B": (4.26, 4.83),
}


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    setting = _base.choose(arg, (*SIZES, "small"), "eagle")
    large = setting in SIZES
    source = f"yuhuili/EAGLE-Vicuna-{SIZES[setting][1]}-v1.3" if large else ""
    tree = {"num_nodes": 60, "levels": 6, "top_k": 10} if large else {"num_nodes": 10, "levels": 4, "top_k": 3}
    rows = {
        "chain": {"name": "eagle", "source": source, "num_nodes": 5 if large else 4},
        "tree": {"name": "eagle2", "source": source, **tree},
    }
    if large:
        target = f"lmsys/vicuna-{SIZES[setting][0]}-v1.3"
        return _base.published(target, rows, PUBLISHED, temperatures=(0.0, 1.0))
    return _base.small(rows, PUBLISHED, temperatures=(0.0, 1.0))
