"""Trains Medusa heads on the target's stored hidden states (Cai et al. 2024): only their residual blocks, 2.5 MiB.

    python -m experiments.hidden_states --config=configs/hidden_states.py:smollm2 --workdir=runs/hidden/smollm2
    python -m experiments.train --config=configs/medusa.py:smollm2 --workdir=runs/medusa

The argument is the target: an alias (`smollm2`) or anything else that `load_target` takes.
"""

from ml_collections import config_dict

from configs import distill


def get_config(arg: str = "smollm2") -> config_dict.ConfigDict:
    """The config of one run."""
    config = distill.get_config(arg)
    config.objective = {
        "name": "medusa",
        "draft_vocab": 6144,
        "num_heads": 4,
        "num_layers": 1,
        "decay": 0.8,  # head i weighs decay^i
        "teacher": 0.5,  # share of the cross-entropy with the target's law; the rest is that with the text
        "ranks": 8,  # at which held-out accuracies are counted, for trees
    }
    config.optimizer.learning_rate = 1e-3
    config.train.best = "greedy/accepted"
    return config
