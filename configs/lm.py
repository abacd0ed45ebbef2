"""Trains a draft on text that its target wrote, with cross-entropy; see configs/distill.py, whose first stage it is."""

from ml_collections import config_dict

from configs import distill


def get_config(arg: str = "smollm2") -> config_dict.ConfigDict:
    """The config of one run."""
    config = distill.get_config(arg)
    del config.objective.divergence, config.objective.beta
    config.objective.name = "lm"
    config.data = {
        "text": "target_text/smollm2-135m-instruct.train.jsonl.gz",
        "temperature": 0.0,  # of the answers to learn from; negative for all
        "held_out_text": "target_text/smollm2-135m-instruct.validation.jsonl.gz",
        "held_out_rows": 16,  # of each held-out set
        "row_length": 512,
    }
    # Many small updates: at the start of training these count for more than the tokens in each.
    config.optimizer.schedule = "constant"
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup = 30
    config.optimizer.steps = config.train.steps = 800
    config.train.batch = 2
    config.train.eval_every = 200
    return config
