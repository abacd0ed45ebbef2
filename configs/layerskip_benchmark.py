"""Drafting from the early layers of a target that LayerSkip trained, by exit layer, on held-out code and prose.

    python -m experiments.pretrain --config=configs/layerskip.py:small --workdir=runs/layerskip
    python -m experiments.benchmark --config=configs/layerskip_benchmark.py:runs/layerskip

Arguments, separated by commas: the run directory of the pretraining, and `quick`, which takes 2 prompts and 16
tokens. A continued training leaves no prompts of its own: --config.prompts=shipped.
"""

from ml_collections import config_dict

from configs import mtp_benchmark


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    config = mtp_benchmark.on_pretrained(*mtp_benchmark.run_and_quick(arg, "runs/layerskip", "layerskip_benchmark"))
    for exit_layer in (2, 3, 4):
        config.rows[f"exit_{exit_layer}"] = {
            "name": "early_exit",
            "exit_layer": exit_layer,
            "num_nodes": 3,
            "min_confidence": 0.5,
        }
    return config
