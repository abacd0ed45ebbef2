"""Li et al. 2024, EAGLE and EAGLE-2 (arXiv:2401.15077, 2406.16858): one head, as a chain, EAGLE's tree and EAGLE-2's.

    python -m experiments.benchmark --config=configs/papers/eagle.py:vicuna7b --workdir=runs/eagle_paper

`vicuna7b`, `vicuna13b`: the published heads (one A100, batch 1, MT-bench). `small`: the zoo's head on SmolLM2, or
one's own (configs/eagle.py); give the rows their sources, those without are left out.
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


# The 25 nodes of EAGLE's tree, of their code (`mc_sim_7b_63`); and its first three levels, for the small setting.
TREE = _base.tree(
    {
        (): 4, (0,): 3, (1,): 2, (2,): 2, (3,): 1, (0, 0): 3, (0, 1): 2, (0, 2): 2, (1, 0): 1, (0, 0, 0): 3,
        (0, 0, 0, 0): 2,
    }
)  # fmt: skip
SMALL_TREE = _base.tree({(): 3, (0,): 2, (1,): 1, (0, 0): 2, (0, 0, 0): 1})


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    setting = _base.choose(arg, (*SIZES, "small"), "eagle")
    large = setting in SIZES
    source = f"yuhuili/EAGLE-Vicuna-{SIZES[setting][1]}-v1.3" if large else _base.head("eagle")
    tree = {"num_nodes": 60, "levels": 6, "top_k": 10} if large else {"num_nodes": 10, "levels": 4, "top_k": 3}
    rows = {
        "chain": {"name": "eagle", "source": source, "num_nodes": 5 if large else 4},
        "static": {"name": "eagle", "source": source, "choices": TREE if large else SMALL_TREE},
        "tree": {"name": "eagle2", "source": source, **tree},
    }
    if large:
        target = f"lmsys/vicuna-{SIZES[setting][0]}-v1.3"
        return _base.published(target, rows, PUBLISHED, temperatures=(0.0, 1.0))
    return _base.small(rows, PUBLISHED, temperatures=(0.0, 1.0))
