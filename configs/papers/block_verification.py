"""Sun et al. 2024, Block verification accelerates speculative decoding (arXiv:2403.10444): the rule, all else equal.

    python -m experiments.benchmark --config=configs/papers/block_verification.py:vicuna7b --workdir=runs/block
    python -m experiments.benchmark --config=configs/papers/block_verification.py:small --workdir=runs/block

T = 1, gamma 4 and 8. The paper's models are not public; `vicuna7b` is its question on a pair that is.
"""

from ml_collections import config_dict

from configs.papers import _base

# Wall clock of block over token-by-token verification.
PUBLISHED = {"gain": (0.05, 0.08)}
GAMMAS = (4, 8)


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    setting = _base.choose(arg, ("vicuna7b", "small"), "block_verification")
    source = "double7/vicuna-68m" if setting == "vicuna7b" else _base.DRAFT
    draft = {"name": "draft_model", "source": source, "num_nodes": GAMMAS}
    rows = {"token": {**draft, "rule": "speculative"}, "block": {**draft, "rule": "block"}}
    if setting == "vicuna7b":
        return _base.published(
            "lmsys/vicuna-7b-v1.3", rows, PUBLISHED, prompts=_base.SPEC_BENCH, temperatures=(1.0,), max_new_tokens=128
        )
    return _base.small(rows, PUBLISHED, temperatures=(1.0,))
