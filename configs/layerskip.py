"""LayerSkip training (Elhoushi et al. 2024): a target whose early layers draft for it.

A small model from scratch, on the corpus of configs/mtp.py; and a short continued training of a pretrained target on
its own text:

    python -m experiments.pretrain --config=configs/layerskip.py:small --workdir=runs/layerskip
    python -m experiments.pretrain --config=configs/layerskip.py:smollm2 --workdir=runs/layerskip_smollm2
    python -m experiments.benchmark --config=configs/layerskip_benchmark.py:runs/layerskip

`results.json` has accuracy and perplexity behind every layer, before and after. To tell what LayerSkip adds to training
as such: --config.objective.dropout=0. --config.objective.exit_scale=0. in another workdir. Arguments: `small` or `tiny`
(a minute: whether it works at all); else the target, an alias or anything that `load_target` takes.
"""

from ml_collections import config_dict

from configs import mtp


def get_config(arg: str = "small") -> config_dict.ConfigDict:
    """The config of one run."""
    return scratch(arg) if arg in mtp.SIZES else continued(arg)


def scratch(size: str) -> config_dict.ConfigDict:
    """From random parameters: dropout comes up over the steps."""
    config = mtp.pretraining(size, heads=1)
    if size == "tiny":
        config.model.num_layers = 3  # The exit behind the first layer has no weight: two would leave none to train.
    config.objective = {
        "name": "layerskip",
        "dropout": 0.1,
        "ramp": "exponential",
        "exit_scale": 0.2,
        "curriculum": "rotational",
        "every": 2 if size == "tiny" else 3,
    }
    config.train.best = "code/match"
    return config


def continued(target: str) -> config_dict.ConfigDict:
    """From a pretrained target: constant dropout."""
    steps = 200
    config = config_dict.ConfigDict()
    config.target = {"source": target, "dtype": "float32"}
    config.data = {
        "text": "target_text/smollm2-135m-instruct.train.jsonl.gz",
        "held_out_text": "target_text/smollm2-135m-instruct.validation.jsonl.gz",
        "held_out_rows": 16,  # of each held-out set
        "row_length": 256,
    }
    config.objective = {
        "name": "layerskip",
        "dropout": 0.1,
        "ramp": "constant",
        "exit_scale": 0.2,
        "curriculum": "rotational",
        "every": 8,
    }
    config.optimizer = {
        "learning_rate": 1e-4,
        "schedule": "cosine",
        "steps": steps,
        "warmup": 20,
        "weight_decay": 0.01,
        "clip": 1.0,
    }
    config.train = {
        "steps": steps,
        "batch": 4,
        "seed": 0,
        "log_every": 10,
        "eval_every": 100,
        # Not the last layer's alone: on its own greedy text nothing beats the target before it was trained. The mean
        # over exits may rise while the last one's falls, which results.json shows.
        "best": "greedy/match_exits",
        "precision": "float32",
        "accumulate": 1,
        "remat": "none",
        "ema": 0.0,
    }
    return config
