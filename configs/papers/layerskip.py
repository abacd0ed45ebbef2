"""Elhoushi et al. 2024, LayerSkip (arXiv:2404.16710): the target's first layers draft for the whole of it.

    python -m experiments.benchmark --config=configs/papers/layerskip.py:llama2_7b --workdir=runs/layerskip_paper

`llama2_7b`: the published checkpoint (CC BY-NC), trained to exit early, on HumanEval. `small`: SmolLM2, which was not,
beside skipped layers (Zhang et al. 2023, arXiv:2309.08168).
"""

from ml_collections import config_dict

from configs.papers import _base

# Speedups of the abstract.
PUBLISHED = {"CNNDM": (2.16,), "coding": (1.82,), "TOPv2": (2.0,)}


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    setting = _base.choose(arg, ("llama2_7b", "small"), "layerskip")
    if setting == "llama2_7b":
        rows = {f"exit {e}": {"name": "early_exit", "exit_layer": e, "num_nodes": 6} for e in (6, 8, 12)}
        return _base.published(
            "facebook/layerskip-llama2-7B",
            rows,
            PUBLISHED,
            prompts=_base.HUMANEVAL,
            max_new_tokens=512,
            template="plain",  # a base model
        )
    rows = {f"exit {e}": {"name": "early_exit", "exit_layer": e, "num_nodes": 3} for e in (4, 10, 20)}
    rows["skip"] = {"name": "layer_skip", "skip": (8, 10, 12, 14, 16, 18, 20, 22, 24, 26), "num_nodes": 3}
    return _base.small(rows, PUBLISHED)
