"""Ankner et al. 2024, Hydra (arXiv:2402.05109): sequentially dependent heads beside Medusa's independent ones.

    python -m experiments.benchmark --config=configs/papers/hydra.py:vicuna7b --workdir=runs/hydra_paper

`vicuna7b`, `vicuna13b`: the published heads (one A100, batch 1, MT-bench). `small`: the zoo's heads on SmolLM2, or
one's own (configs/hydra.py and medusa.py); give the rows their sources, those without are left out.
"""

from ml_collections import config_dict

from configs.papers import _base
from configs.papers.medusa import CHOICES, SIZES, TREE_63

# MT-bench, greedy: speedup over plain decoding, and over Medusa.
PUBLISHED = {"Hydra++ 7B": (2.70, 1.27), "Hydra++ 13B": (2.50, 1.27), "Hydra++ 33B": (2.53, 1.31)}


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    setting = _base.choose(arg, (*SIZES, "small"), "hydra")
    size = SIZES.get(setting)
    hydra, medusa = _base.head("hydra"), _base.head("medusa")
    if size:
        hydra, medusa = f"ankner/hydra-vicuna-{size}-v1.3", f"FasterDecoding/medusa-vicuna-{size}-v1.3"
    tree = {"tree": "choices", "choices": TREE_63 if size else CHOICES}
    rows = {
        "hydra": {"name": "hydra", "source": hydra, **tree},
        "medusa": {"name": "medusa", "source": medusa, **tree},
    }
    return _base.published(f"lmsys/vicuna-{size}-v1.3", rows, PUBLISHED) if size else _base.small(rows, PUBLISHED)
