"""Beside transformers (torch, the same weights in float32): 12 prompts of Spec-Bench, 64 new tokens, greedy, batch 1.

    python -m experiments.benchmark --config=configs/peers.py --workdir=runs/peers

Spec-Bench is read from SPECJAX_DATA; the shipped prompts take its place where that is not set. Prefill is part of every
time. Needs torch: pip install 'specjax[torch]'. The argument `quick` takes 2 prompts and 16 tokens.
"""

from ml_collections import config_dict

# The zoo entry, or the path of a trained draft model, of the rows `draft` and `transformers_assisted` (the latter takes
# model directories and hub ids too); empty leaves them out.
DRAFT = "smollm2-135m-distilled"


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    if arg not in (None, "", "quick"):
        raise ValueError(f"unknown argument {arg!r} of configs/peers.py; known: quick")
    quick = arg == "quick"
    config = config_dict.ConfigDict()
    config.target = {"source": "smollm2", "dtype": "float32"}
    config.system_prompt = config_dict.placeholder(str)
    config.template = "chat"  # or plain, vicuna, a Jinja file

    config.prompts = "spec_bench:$SPECJAX_DATA/spec_bench/question.jsonl"
    config.prompts_fallback = "shipped"
    config.prompts_per_category = 2
    config.max_prompts = 2 if quick else 12
    config.max_new_tokens = 16 if quick else 64

    config.temperatures = (0.0,)
    config.top_k = 0
    config.top_p = 1.0
    config.seed = 0

    # `threads` of torch: 0 for all cores, as many as XLA takes.
    config.rows = {
        "autoregressive": {"name": "autoregressive"},
        "draft": {"name": "draft_model", "source": DRAFT, "num_nodes": 4},
        "prompt_lookup": {"name": "prompt_lookup", "num_nodes": 3},
        "transformers_greedy": {"name": "transformers_greedy", "threads": 0},
        "transformers_lookup": {"name": "transformers_lookup", "threads": 0, "num_nodes": 3},
        # The same draft, written for transformers, which gives it the target's whole head.
        "transformers_assisted": {"name": "transformers_assisted", "threads": 0, "source": DRAFT, "num_nodes": 4},
    }
    config.only = ()

    config.batch = 1
    config.repeats = 1 if quick else 2
    config.layout = "packed"
    config.mesh = {"data": 1, "fsdp": 1, "tensor": 1, "target": "fsdp_tp", "drafter": "dp"}  # -1: the other devices
    config.precision = "float32"
    config.near_tie_bound = 0.0
    config.loop_threshold = 0.4
    config.coloured_texts = 0
    return config
