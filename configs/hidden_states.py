"""Runs the frozen target over its own text once and stores its hidden states.

    python -m experiments.hidden_states --config=configs/hidden_states.py:smollm2 --workdir=runs/hidden/smollm2

Interrupted, the same command goes on; training can begin on the shards that are finished.
"""

from ml_collections import config_dict

TEXT = "target_text/smollm2-135m-instruct"


def get_config(arg: str = "smollm2") -> config_dict.ConfigDict:
    """The config of one store."""
    config = config_dict.ConfigDict()
    config.target = {"source": arg, "dtype": "float32"}
    config.store = {"row_length": 512, "pass_rows": 8, "taps": (), "seed": 0}
    # A negative temperature takes every answer; otherwise those drawn at it.
    config.parts = {
        "greedy": {"text": f"{TEXT}.validation.jsonl.gz", "temperature": 0.0, "shard_rows": 32, "max_shards": 1},
        "sampled": {"text": f"{TEXT}.validation.jsonl.gz", "temperature": 1.0, "shard_rows": 32, "max_shards": 1},
        "train": {"text": f"{TEXT}.train.jsonl.gz", "temperature": -1.0, "shard_rows": 64, "max_shards": 0},
    }
    return config
