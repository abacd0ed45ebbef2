"""Greedy equality in float32: every shipped prompt and 60 of Spec-Bench, at batch 1 and in ragged batches of 8.

    python -m experiments.equality --config=configs/equality.py

Spec-Bench is read from SPECJAX_DATA, and left out, saying so, where that is not set. The argument `quick` takes two
prompts of each category and 16 tokens.
"""

from ml_collections import config_dict

# Zoo entries, or paths of trained drafters, of the rows `draft` and `eagle3`; empty leaves a row out.
DRAFT, HEAD = "smollm2-135m-distilled", "smollm2-135m-eagle3"


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    if arg not in (None, "", "quick"):
        raise ValueError(f"unknown argument {arg!r} of configs/equality.py; known: quick")
    quick = arg == "quick"
    config = config_dict.ConfigDict()
    config.target = {"source": "smollm2", "dtype": "float32"}
    # Name -> what load_prompts takes, and how many of each category (0 for all).
    config.prompts = {
        "shipped": {"source": "shipped", "per_category": 2 if quick else 0},
        "spec_bench": {
            "source": "spec_bench:$SPECJAX_DATA/spec_bench/question.jsonl",
            "per_category": 2 if quick else 10,
        },
    }
    config.max_new_tokens = 16 if quick else 64
    config.batches = (1, 8)
    # With `num_nodes`, plain decoding in passes of that many more tokens: where precision is low, a method of as many
    # nodes then differs from it in nothing but the method.
    config.rows = {
        "autoregressive": {"name": "autoregressive", "num_nodes": 0},
        "draft": {"name": "draft_model", "source": DRAFT, "num_nodes": 4},
        "eagle3": {"name": "eagle3", "source": HEAD, "num_nodes": 2},
        "prompt_lookup": {"name": "prompt_lookup", "num_nodes": 3},
    }
    config.only = ()
    config.seed = 0
    config.layout = "packed"
    config.mesh = {"data": 1, "fsdp": 1, "tensor": 1, "target": "fsdp_tp", "drafter": "dp"}  # -1: the other devices
    config.precision = "float32"
    config.near_tie_bound = 0.0  # 0: from dtype and precision
    return config
