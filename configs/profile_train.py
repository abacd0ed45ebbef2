"""What a training step of every objective costs: tokens a second and peak memory, and five of them stated in torch.

    python -m experiments.profile_train --config=configs/profile_train.py:smollm2 --workdir=runs/profile_train

Rows are random tokens, their hidden states computed beforehand, as from a store. Each measurement has a process of its
own. Of the objectives `--config.only="('eagle3',)"` takes some; `--config.torch="()"` leaves torch out (it is the extra
`torch`). The argument is the target: an alias (`smollm2`) or anything else that `load_target` takes.
"""

from ml_collections import config_dict

from configs import distill, eagle, eagle3, hydra, lm, medusa, mtp, redrafter


def get_config(arg: str = "smollm2") -> config_dict.ConfigDict:
    """The config of one run."""
    config = config_dict.ConfigDict()
    config.target = {"source": arg, "dtype": "float32"}
    config.objectives = {
        "distill": distill.get_config(arg).objective,
        "eagle": eagle.get_config(arg).objective,
        "eagle3": eagle3.get_config(arg).objective,
        "hydra": hydra.get_config(arg).objective,
        "lm": lm.get_config(arg).objective,
        "medusa": medusa.get_config(arg).objective,
        "mtp": mtp.frozen(arg).objective,
        "redrafter": redrafter.get_config(arg).objective,
    }
    config.only = ()  # names of objectives; empty for all
    config.torch = ("distill", "eagle", "eagle3", "hydra", "medusa")
    config.draft_vocab = 0  # of every objective; 0 for what each says
    config.batch = 4
    config.row_length = 512
    config.steps = 5  # that are timed, after one that is not
    config.precision = "float32"
    config.seed = 0
    config.optimizer = {
        "learning_rate": 1e-3,
        "schedule": "constant",
        "steps": 1000,
        "warmup": 0,
        "b1": 0.9,
        "b2": 0.95,
        "weight_decay": 0.01,
        "clip": 1.0,
    }
    return config
