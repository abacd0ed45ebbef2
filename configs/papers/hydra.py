"""Ankner et al. 2024, Hydra (arXiv:2402.05109): sequentially dependent heads beside Medusa's independent ones.

    python -m experiments.benchmark --config=configs/papers/hydra.py:vicuna7b --workdir=runs/hydra_paper

`vicuna7b`, `vicuna13b`: the published heads (one A100, batch 1, MT-bench). `small`: heads of one's own on SmolLM2
(configs/hydra.py and medusa.py); give the rows their sources, those without are left out.
"""

from ml_collections import config_dict

from configs.papers import _base
from configs.papers.medusa import CHOICES, SIZES

# MT-bench, greedy: speedup over plain decoding, and over Medusa.
PUBLISHED = {"Hydra++ 7B": (2.70, 1.27), "Hydra++ 13B": (2.50, 1.27), "Hydra++ 33B": (2.53, 1.31)}


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    setting = _base.choose(arg, (*SIZES, "small"), "hydra")
    size = SIZES.get(setting)
    tree = {"tree": "choices", "choices": CHOICES}
    rows = {
        "hydra": {"name": "hydra", "source": f"ankner/hydra-vicuna-{size}-v1.3" if size else "", **tree},
        "medusa": {"name": "medusa", "source": f"FasterDecoding/medusa-vicuna-{size}-v1.3" if size else "", **tree},
    }
    return _base.published(f"lmsys/vicuna-{size}-v1.3", rows, PUBLISHED) if size else _base.small(rows, PUBLISHED)
