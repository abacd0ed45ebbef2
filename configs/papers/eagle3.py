"""EAGLE-3 as published (Li et al. 2025, 2503.01840, and its authors' training code), the target on accelerators.

    python -m experiments.plan_memory --config=configs/papers/eagle3.py:llama3_8b
    python -m experiments.compile_for --config=configs/papers/eagle3.py:llama3_8b --topology=v5e:16x16
    python -m experiments.train --config=configs/papers/eagle3.py:llama3_8b --workdir=gs://bucket/eagle3

Published: AdamW at 5e-5 (betas 0.9, 0.95, no weight decay) with 12,000 warm-up steps of 800,000, gradients clipped to
0.5, seven steps of training-time test weighted 0.8^k, rows of at most 2048 tokens, a draft vocabulary of 32,000 with a
head of its own, half precision in the target; 68 k ShareGPT and 464 k UltraChat-200k conversations. Acceptance lengths
to hold against it, mean over five tasks at temperature 0: 6.62 for Vicuna 13B, 6.23 for Llama 3.1 8B, 5.88 for Llama
3.3 70B.

Not from the paper: rows are packed, and 256 of them make a batch, one a chip of a 16x16 slice. Their code accumulates
two rows a device; on eight devices 800,000 such steps are as many rows as 50,000 of these, and warm-up shrinks alike.
`data.text` are answers of the target as experiments.regenerate writes them.

Arguments: a model of specjax/models/published.py (`llama3_8b`, `llama3_70b`), and `decode` or `train` for compile_for;
`small` is the shape of this experiment on SmolLM2-135M-Instruct and its shipped text, from a hidden-state store.
"""

from ml_collections import config_dict

from configs import eagle3

PROGRAMS = ("train", "decode")
MLP = {"llama3_8b": 14336, "llama3_70b": 28672}  # of the published heads, the target's own


def get_config(arg: str = "llama3_8b") -> config_dict.ConfigDict:
    """The config of one model."""
    arguments = arg.split(",")
    models = [a for a in arguments if a not in PROGRAMS]
    programs = [a for a in arguments if a in PROGRAMS]
    if len(models) > 1 or len(programs) > 1:
        raise ValueError(f"argument {arg!r} of configs/papers/eagle3.py; expected one model and one of train, decode")
    model = models[0] if models else "llama3_8b"
    if model == "small":
        config = eagle3.get_config("smollm2")
        config.objective.steps, config.objective.own_head = 7, True
        return config

    # Imported here: the short names are those of the published shapes.
    from specjax.models.published import SHORT

    config = eagle3.get_config(SHORT.get(model, model))
    config.model, config.program = model, (programs or ["train"])[0]
    config.dtype = config.target.dtype = "bfloat16"
    config.precision = config.train.precision = "default"
    config.data.online, config.data.taps = True, ()  # those of the objective: 2, n // 2, n - 3
    config.data.text = "target_text/llama-3.1.train.jsonl.gz"
    config.data.held_out_text = "target_text/llama-3.1.validation.jsonl.gz"
    config.data.row_length = 2048
    config.data.held_out_rows = 256
    config.objective.update({"draft_vocab": 32000, "steps": 7, "own_head": True})
    config.objective.intermediate_size = MLP.get(model, 14336)
    config.optimizer.update(
        {"learning_rate": 5e-5, "schedule": "linear", "warmup": 750, "weight_decay": 0.0, "clip": 0.5}
    )
    config.optimizer.steps = config.train.steps = 50_000
    config.train.update({"batch": 256, "accumulate": 1, "eval_every": 500, "log_every": 20})
    config.mesh = {"data": 1, "fsdp": -1, "tensor": 1, "target": "fsdp", "drafter": "fsdp"}

    # For compile_for and plan_memory: decoding with the head, a chain of the published benchmark's servers.
    config.drafter = {"name": "eagle3", "topology": "chain", "num_nodes": 5}
    config.decode = {"batch": 8, "buffer": 4096, "temperature": 0.0, "rule": ""}
    if config.program == "decode":
        config.mesh = {"data": 1, "fsdp": 1, "tensor": -1, "target": "tp", "drafter": "tp"}
    config.memory = {
        # With the width of each one's head.
        "models": {name: MLP.get(name, 14336) for name in dict.fromkeys((model, "llama3_70b"))},
        "chips": ("v5e", "v6e", "v5p"),
        "decode": (
            {"name": "eagle3", "topology": "chain", "num_nodes": 8},
            {"name": "eagle3", "topology": "tree", "num_nodes": 60, "levels": 8, "top_k": 10},
        ),
    }
    return config
