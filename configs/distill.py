"""Distils a small draft out of a target: forward KL against its stored law (DistillSpec; Zhou et al. 2024).

    python -m experiments.hidden_states --config=configs/hidden_states.py:smollm2
    python -m experiments.train --config=configs/lm.py:smollm2 --workdir=runs/lm
    python -m experiments.train --config=configs/distill.py:smollm2 --config.init_from=runs/lm --workdir=runs/distill

The middle line is optional: it starts the draft on the target's text alone, without a pass of the target.
The argument is the target: an alias (`smollm2`) or anything else that `load_target` takes.
"""

from ml_collections import config_dict


def get_config(arg: str = "smollm2") -> config_dict.ConfigDict:
    """The config of one run."""
    config = config_dict.ConfigDict()
    config.target = {"source": arg, "dtype": "float32"}
    # Text paths are relative to SPECJAX_DATA, stores to the working directory.
    config.data = {
        "text": "target_text/smollm2-135m-instruct.train.jsonl.gz",
        "store": "runs/hidden/smollm2/train",  # or several, separated by commas
        "held_out": {"greedy": "runs/hidden/smollm2/greedy", "sampled": "runs/hidden/smollm2/sampled"},
        "max_shards": 0,  # of each training store; 0 for all that are finished
        # Online, the target runs on the text in every step (accelerators), and no store is read. `taps` are the layer
        # inputs to have besides the final hidden state; empty for those that the objective reads.
        "online": False,
        "taps": (),
        # On-policy data: this share of each batch's rows is written by the draft as it is, anew every so many steps;
        # the rest is the text. It needs `online`, for the target to answer.
        "on_policy": {
            "share": 0.0,
            "every": 50,
            "prompts": 32,
            "max_new_tokens": 128,
            "temperature": 1.0,
            "batch": 16,
        },
        "temperature": -1.0,
        "row_length": 512,
        "held_out_text": "target_text/smollm2-135m-instruct.validation.jsonl.gz",
        "held_out_rows": 16,  # of each held-out set
    }
    config.objective = {
        "name": "distill",
        "divergence": "forward_kl",  # or reverse_kl, jsd, tvd, lk
        "beta": 0.5,  # of jsd
        "layers": (0, 29),
        "intermediate_size": 1024,
        "draft_vocab": 6144,
    }
    config.optimizer = {
        "name": "adamw",  # or adafactor, lion, muon, sgd
        "learning_rate": 1e-3,
        "schedule": "cosine",
        "steps": 1500,
        "warmup": 50,
        "weight_decay": 0.01,
        "clip": 1.0,
        "rates": (),  # pairs of where parameters lie and a factor on their rate, such as (("layers/0", 0.1),)
    }
    config.train = {
        "steps": 1500,
        "batch": 4,
        "seed": 0,
        "log_every": 10,
        "eval_every": 100,
        "best": "greedy/match",
        "precision": "float32",
        "accumulate": 1,
        "remat": "none",  # or full, dots, dots_no_batch: less memory for more work (docs/training.md)
        "ema": 0.0,
        "nonfinite": "stop",  # or skip: what a loss or gradient that is not finite leads to
        "profile": (),  # first step and number of steps to trace, such as (20, 5)
    }
    # Real decoding at every evaluation, of prompts such as "shipped": greedy, with the drafter as it would be saved.
    # Its mean tau is `decode/tau`, which `train.best` may name. Empty for none.
    config.decoding = {"prompts": "", "prompts_per_category": 1, "max_new_tokens": 48}
    # Devices: -1 takes those that the other axes leave. Presets say how each parameter tree is split.
    config.mesh = {"data": 1, "fsdp": 1, "tensor": 1, "target": "dp", "drafter": "dp"}
    config.init_from = ""  # a run directory whose best parameters to start from
    return config


def sweep() -> dict[str, tuple]:
    """For experiments.sweep: learning rates, each with three seeds."""
    return {"optimizer.learning_rate": (5e-4, 1e-3, 2e-3), "train.seed": (0, 1, 2)}
