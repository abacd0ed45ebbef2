"""Leviathan et al. 2023, Fast inference from transformers via speculative decoding (arXiv:2211.17192): tables 2 to 4.

    python -m experiments.benchmark --config=configs/papers/leviathan.py:small --workdir=runs/leviathan

The paper's models are encoder-decoders (T5-XXL with T5-small, -base and -large, on one TPU v4, batch 1), which specjax
does not read; `small`, the only setting, asks its question on SmolLM2: is measured over expected what it was there?
"""

from ml_collections import config_dict

from configs.papers import _base

# Table 4, by task, draft and temperature: gamma, alpha, expected and measured improvement.
PUBLISHED = {
    "EnDe T5-small T0": (7, 0.75, 3.2, 3.4),
    "EnDe T5-base T0": (7, 0.80, 3.3, 2.8),
    "EnDe T5-large T0": (7, 0.82, 2.5, 1.7),
    "EnDe T5-small T1": (7, 0.62, 2.3, 2.6),
    "EnDe T5-base T1": (5, 0.68, 2.4, 2.4),
    "EnDe T5-large T1": (3, 0.71, 2.0, 1.4),
    "CNNDM T5-small T0": (5, 0.65, 2.4, 3.1),
    "CNNDM T5-base T0": (5, 0.73, 2.6, 3.0),
    "CNNDM T5-large T0": (3, 0.74, 2.0, 2.2),
    "CNNDM T5-small T1": (5, 0.53, 1.9, 2.3),
    "CNNDM T5-base T1": (3, 0.55, 1.8, 2.2),
    "CNNDM T5-large T1": (3, 0.56, 1.6, 1.7),
}


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    _base.choose(arg, ("small",), "leviathan")
    rows = {"draft": {"name": "draft_model", "source": _base.DRAFT, "num_nodes": (1, 3, 5, 7)}}
    return _base.small(rows, PUBLISHED, temperatures=(0.0, 1.0))
