"""Trains Hydra heads on the target's stored hidden states (Ankner et al. 2024): 3.7 MiB with four heads.

    python -m experiments.hidden_states --config=configs/hidden_states.py:smollm2 --workdir=runs/hidden/smollm2
    python -m experiments.train --config=configs/hydra.py:smollm2 --workdir=runs/hydra

Embeddings enter at a sixth of their width, through one matrix for all heads, and the hidden state is the residual: the
published form, `embed_rank=0` and `residual="linear"`, has 17.7 MiB here. `--config.objective.prefix=True` and
`--config.objective.num_layers=4` make it Hydra++.
The argument is the target: an alias (`smollm2`) or anything else that `load_target` takes.
"""

from ml_collections import config_dict

from configs import medusa


def get_config(arg: str = "smollm2") -> config_dict.ConfigDict:
    """The config of one run."""
    config = medusa.get_config(arg)
    config.objective.name = "hydra"
    config.objective.embed_rank = 96
    config.objective.residual = "hidden"
    config.objective.prefix = False
    return config
