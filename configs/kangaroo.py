"""Trains Kangaroo's adapter behind the target's first layers: attention and two norms, by the target's law (Liu 2024).

    python -m experiments.hidden_states --config=configs/hidden_states.py:smollm2 --config.store.taps="(2, 15, 27)"
    python -m experiments.train --config=configs/kangaroo.py:smollm2 --workdir=runs/kangaroo
    python -m experiments.benchmark --config=configs/self_drafting.py --config.rows.kangaroo.source=runs/kangaroo

A store without the input of the exit layer will do: the first layers then run in the step. The argument is the target.
"""

from ml_collections import config_dict

from configs import distill


def get_config(arg: str = "smollm2") -> config_dict.ConfigDict:
    """The config of one run."""
    config = distill.get_config(arg)
    config.objective = {
        "name": "kangaroo",
        "exit_layer": 2,  # how many of the target's layers draft
        "draft_vocab": 6144,
        "divergence": "forward_kl",
    }
    return config
