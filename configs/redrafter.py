"""Trains a ReDrafter network on the target's stored hidden states (Cheng et al. 2024): 4.4 MiB.

    python -m experiments.hidden_states --config=configs/hidden_states.py:smollm2 --workdir=runs/hidden/smollm2
    python -m experiments.train --config=configs/redrafter.py:smollm2 --workdir=runs/redrafter

The residual blocks have the target's width; the published form has twice that (`--config.objective.exit_dim=0`). The
argument is the target: an alias (`smollm2`) or anything else that `load_target` takes.
"""

from ml_collections import config_dict

from configs import distill


def get_config(arg: str = "smollm2") -> config_dict.ConfigDict:
    """The config of one run."""
    config = distill.get_config(arg)
    config.objective = {
        "name": "redrafter",
        "draft_vocab": 6144,
        "steps": 5,
        "num_layers": 2,
        "exit_dim": 576,
        "recurrent": True,  # False: the state is a sum of embeddings
        "decay": 1.0,  # depth i weighs decay^i
        "teacher": 0.5,  # share of the cross-entropy with the target's law; the authors train on text alone
        "ranks": 1,
    }
    config.optimizer.learning_rate = 1e-3
    config.train.best = "greedy/accepted"
    return config
