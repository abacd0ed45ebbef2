"""Trains an EAGLE-3 head: three layers of the target fused, training-time test (Li et al. 2025).

    python -m experiments.hidden_states --config=configs/hidden_states.py:smollm2 --config.store.taps="(2, 15, 27)"
    python -m experiments.train --config=configs/eagle3.py:smollm2 --workdir=runs/eagle3

The store holds the inputs of the target's layers 2, n // 2, n - 3; it serves every other objective too. The paper's
seven steps of training-time test: --config.objective.steps=7. The norms of EAGLE-3.1:
--config.objective.norms="('fc_norm', 'norm_output')". The argument is the target.
"""

from ml_collections import config_dict


def get_config(arg: str = "smollm2") -> config_dict.ConfigDict:
    """The config of one run."""
    config = config_dict.ConfigDict()
    config.target = {"source": arg, "dtype": "float32"}
    # Text paths are relative to SPECJAX_DATA, stores to the working directory.
    config.data = {
        "text": "target_text/smollm2-135m-instruct.train.jsonl.gz",
        "store": "runs/hidden/smollm2/train",
        "held_out": {"greedy": "runs/hidden/smollm2/greedy", "sampled": "runs/hidden/smollm2/sampled"},
        "max_shards": 0,  # of the training store; 0 for all that are finished
        # Online, the target runs on the text in every step (accelerators), and no store is read. `taps` are the layer
        # inputs that the objective reads besides the final hidden state.
        "online": False,
        "taps": (2, 15, 27),
        "temperature": -1.0,
        "row_length": 512,
        "held_out_text": "target_text/smollm2-135m-instruct.validation.jsonl.gz",
        "held_out_rows": 16,  # of each held-out set
    }
    config.objective = {
        "name": "eagle3",
        "intermediate_size": 1536,
        "draft_vocab": 6144,
        "taps": (),  # empty: layers 2, n // 2, n - 3
        "norms": (),
        "steps": 3,
        "decay": 0.8,
        "own_head": False,  # True: a trained head [d, Vd] of its own, as published, instead of the target's rows
    }
    config.optimizer = {
        "learning_rate": 1e-3,
        "schedule": "cosine",
        "steps": 3000,
        "warmup": 100,
        "b1": 0.9,
        "b2": 0.95,
        "weight_decay": 0.01,
        "clip": 0.5,
    }
    config.train = {
        "steps": 3000,
        "batch": 4,
        "seed": 0,
        "log_every": 10,
        "eval_every": 200,
        "best": "greedy/accepted",
        "precision": "float32",
        "accumulate": 1,
        "ema": 0.0,
    }
    # Devices: -1 takes those that the other axes leave. Presets say how each parameter tree is split.
    config.mesh = {"data": 1, "fsdp": 1, "tensor": 1, "target": "dp", "drafter": "dp"}
    config.init_from = ""  # a run directory whose best parameters to start from
    return config
