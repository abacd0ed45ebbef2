"""Gloeckle et al. 2024, Better and faster LLMs via multi-token prediction (arXiv:2404.19737): speed by heads.

    python -m experiments.pretrain --config=configs/mtp.py:small,heads=4
    python -m experiments.benchmark --config=configs/papers/gloeckle.py:small --workdir=runs/gloeckle

The paper's models of 7B are trained from scratch (batch 42 at decoding); `small`, the only setting, is 5.6 M parameters
on Python and prose: do tokens a pass grow with the heads used, and more on code?
"""

from ml_collections import config_dict

from configs import mtp_benchmark
from configs.papers import _base

# Table S2, greedy: speedup and tokens a pass with 2, 3 and 4 heads.
PUBLISHED = {
    "Wikipedia": ((1.79, 1.88), (2.35, 2.57), (2.74, 3.12)),
    "Books": ((1.77, 1.87), (2.32, 2.56), (2.67, 3.09)),
    "Code": ((1.85, 1.94), (2.54, 2.78), (3.05, 3.50)),
}


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    _base.choose(arg, ("small",), "gloeckle")
    config = mtp_benchmark.get_config()
    config.published = PUBLISHED
    return config
