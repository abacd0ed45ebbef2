"""Trains an EAGLE-3 head on text of one's own, the target running in the step.

    python -m experiments.inspect_data --config=configs/user_data.py:chats.jsonl
    python -m experiments.train --config=configs/user_data.py:chats.jsonl --workdir=runs/chats

The argument is a `.jsonl`, `.parquet` or `.arrow` file, a directory of them, or the id of a data set on the hub. A row
of kind `chat` has its turns in `messages` (`role` and `content`, or `from` and `value`); of kind `plain` its text in
`--config.data.dataset.field`. Another objective: its `config.objective` from its own config.

A draft learns the target's own law: answers that the target did not write teach it less (experiments.regenerate writes
such answers to the same prompts).
"""

from ml_collections import config_dict

from configs import eagle3


def get_config(arg: str = "chats.jsonl") -> config_dict.ConfigDict:
    """The config of one run."""
    config = eagle3.get_config("smollm2")
    config.data = {
        "dataset": {
            "path": arg,
            "name": "",  # of a configuration on the hub
            "split": "train",
            "kind": "chat",
            "field": "messages",
            "max_rows": 0,
        },
        "row_length": 512,
        "held_out_rows": 16,
        "cache": "runs/tokens",  # tokenised text, found again by its hash; empty for none
        "online": True,
        "taps": (),
    }
    config.train.best = "held_out/accepted"
    return config
