"""Multi-token prediction.

Pretraining from scratch, next token only (`heads=1`) or with further heads (Gloeckle et al. 2024), on the sources of
Python's standard library and the prose in SPECJAX_DATA/text:

    python -m experiments.pretrain --config=configs/mtp.py:small,heads=4
    python -m experiments.benchmark --config=configs/mtp_benchmark.py --workdir=runs/mtp_benchmark

Does it improve the model? Heads and seeds, then the next token's loss against that of one head:

    python -m experiments.sweep --config=configs/mtp.py:small --program=experiments.pretrain --workdir=runs/mtp_sweep
    python -m experiments.next_token runs/mtp_sweep/*/

A shared module on a frozen target (FastMTP), from its hidden-state store:

    python -m experiments.train --config=configs/mtp.py:smollm2 --workdir=runs/fastmtp

Arguments: `small` or `tiny` (a minute: whether it works at all), `heads=<n>` and `kind=sequential`, which trains
DeepSeek-V3's modules in the place of independent heads; else the frozen target, an alias or anything that `load_target`
takes.
"""

from ml_collections import config_dict

SIZES = {
    # 5.6 M parameters with a tied vocabulary of 4096.
    "small": {"hidden_size": 256, "num_layers": 6, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 704},
    "tiny": {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 128},
}

OBJECTIVES = {
    "independent": {"decay": 1.0},
    # lambda at first and from that share of the steps on: 0.3 for 10 of 14.8 T tokens, then 0.1.
    "sequential": {"weights": (0.3, 0.1), "switch": 0.68},
}


def get_config(arg: str = "small") -> config_dict.ConfigDict:
    """The config of one run."""
    size, *options = arg.split(",")
    if size not in SIZES:
        if options:
            raise ValueError(f"unknown argument {options[0]!r} of configs/mtp.py for a frozen target; it takes none")
        return frozen(arg)
    heads, kind = None, "independent"
    for option in options:
        name, _, value = option.partition("=")
        if name == "heads" and value.isdigit():
            heads = int(value)
        elif name == "kind" and value in OBJECTIVES:
            kind = value
        else:
            known = [*SIZES, "heads=<n>", *(f"kind={k}" for k in OBJECTIVES)]
            raise ValueError(f"unknown argument {option!r} of configs/mtp.py; known: {', '.join(known)}")
    if heads is None:
        heads = 2 if kind == "sequential" else 1
    return pretraining(size, heads, kind)


def pretraining(size: str, heads: int, kind: str = "independent") -> config_dict.ConfigDict:
    """For experiments.pretrain."""
    tiny = size == "tiny"
    steps = 30 if tiny else 1200
    config = config_dict.ConfigDict()
    config.model = {**SIZES[size], "vocab_size": 512 if tiny else 4096, "max_position": 2048}
    config.objective = {"name": "mtp", "kind": kind, "heads": heads, **OBJECTIVES[kind]}
    config.data = {
        "code_characters": 200_000 if tiny else 12_000_000,
        "prose": "text",  # relative to SPECJAX_DATA
        "row_length": 64 if tiny else 256,
        "max_tokens": 100_000 if tiny else 5_000_000,
        "held_out_rows": 8 if tiny else 64,
    }
    config.optimizer = {
        "learning_rate": 2e-3,
        "schedule": "cosine",
        "steps": steps,
        "warmup": 5 if tiny else 100,
        "weight_decay": 0.1,
        "clip": 1.0,
    }
    config.train = {
        "steps": steps,
        "batch": 16,
        "seed": 0,
        "log_every": 10,
        "eval_every": 30 if tiny else 200,
        "best": "code/match_1",
        "precision": "float32",
        "accumulate": 1,
        "remat": "none",
        "ema": 0.0,
    }
    return config


def sweep(arg: str = "small") -> dict[str, tuple]:
    """For experiments.sweep with program experiments.pretrain: numbers of heads, each with three seeds."""
    heads = (2, 4) if "kind=sequential" in arg.split(",") else (1, 2, 4)
    return {"objective.heads": heads, "train.seed": (0, 1, 2)}


def frozen(target: str) -> config_dict.ConfigDict:
    """For experiments.train."""
    config = config_dict.ConfigDict()
    config.target = {"source": target, "dtype": "float32"}
    config.data = {
        "text": "target_text/smollm2-135m-instruct.train.jsonl.gz",
        "store": "runs/hidden/smollm2/train",
        "held_out": {"greedy": "runs/hidden/smollm2/greedy", "sampled": "runs/hidden/smollm2/sampled"},
        "max_shards": 0,
    }
    config.objective = {
        "name": "mtp",
        "depth": 3,
        "kind": "sequential",
        "shared": True,
        "draft_vocab": 6144,
        "decay": 0.6,
        "teacher": 0.0,
    }
    config.optimizer = {
        "learning_rate": 5e-4,
        "schedule": "cosine",
        "steps": 1500,
        "warmup": 50,
        "weight_decay": 0.01,
        "clip": 1.0,
    }
    config.train = {
        "steps": 1500,
        "batch": 4,
        "seed": 0,
        "log_every": 10,
        "eval_every": 100,
        "best": "greedy/accepted",
        "precision": "float32",
        "accumulate": 1,
        "remat": "none",
        "ema": 0.0,
    }
    config.mesh = {"data": 1, "fsdp": 1, "tensor": 1, "target": "dp", "drafter": "dp"}
    config.init_from = ""
    return config
