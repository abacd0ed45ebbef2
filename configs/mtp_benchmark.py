"""Tokens a pass against the number of heads that draft, on held-out code and prose, greedy and at T = 1.

    python -m experiments.pretrain --config=configs/mtp.py:small,heads=4 --workdir=runs/mtp4
    python -m experiments.benchmark --config=configs/mtp_benchmark.py:runs/mtp4 --workdir=runs/mtp_benchmark

The argument is the run directory of the pretraining; `,quick` behind it takes 2 prompts and 16 tokens.
"""

from ml_collections import config_dict


def get_config(arg: str = "runs/mtp4") -> config_dict.ConfigDict:
    """The config of one run."""
    run, _, option = arg.partition(",")
    if option not in ("", "quick"):
        raise ValueError(f"unknown argument {option!r} of configs/mtp_benchmark.py; known: quick")
    quick = option == "quick"
    config = config_dict.ConfigDict()
    config.target = {"source": f"{run}/target", "dtype": "float32"}
    config.system_prompt = config_dict.placeholder(str)

    config.template = "plain"  # it was trained on text alone

    config.prompts = f"{run}/prompts.jsonl"
    config.prompts_fallback = ""
    config.prompts_per_category = 1 if quick else 0
    config.max_prompts = 0
    config.long_prompts = "error"  # or skip, which counts them
    config.max_new_tokens = 16 if quick else 128

    config.temperatures = (0.0,) if quick else (0.0, 1.0)
    config.top_k = 0
    config.top_p = 1.0
    config.seed = 0

    config.rows = {
        "autoregressive": {"name": "autoregressive"},
        # Heads beyond the next token's that draft.
        "mtp": {"name": "mtp", "source": f"{run}/drafter", "num_nodes": (1,) if quick else (1, 2, 3), "rule": ""},
    }
    config.only = ()

    config.batch = 1
    config.repeats = 1
    config.layout = "packed"
    config.precision = "float32"
    config.near_tie_bound = 0.0
    config.loop_threshold = 0.4
    config.coloured_texts = 0
    return config
