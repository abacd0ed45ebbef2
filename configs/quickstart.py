"""A first look: 8 of the shipped prompts, one a category, 64 new tokens, greedy, batch 1.

    python -m experiments.benchmark --config=configs/quickstart.py

Arguments, separated by commas:
    full     every shipped prompt, every method that needs no training of yours, draft lengths 1 to 6 of three
             (an hour or two on a small machine; a run that was interrupted goes on)
    sampled  temperature 1 in place of greedy
    quick    2 prompts, 16 tokens: whether it works at all
"""

from ml_collections import config_dict

# Zoo entries, or paths of trained drafters, that the rows of these names measure; empty leaves a row out.
DRAFT = "smollm2-135m-distilled"
EAGLE = "smollm2-135m-eagle"
EAGLE3 = "smollm2-135m-eagle3"
HYDRA = "smollm2-135m-hydra"
MEDUSA = "smollm2-135m-medusa"

ARGUMENTS = ("full", "sampled", "quick")


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    arguments = [a for a in (arg or "").split(",") if a]
    unknown = [a for a in arguments if a not in ARGUMENTS]
    if unknown:
        raise ValueError(f"unknown argument {unknown[0]!r} of configs/quickstart.py; known: {', '.join(ARGUMENTS)}")
    full, quick = "full" in arguments, "quick" in arguments

    config = config_dict.ConfigDict()
    config.target = {"source": "smollm2", "dtype": "float32"}
    config.system_prompt = config_dict.placeholder(str)  # None: what the chat template says
    config.template = "chat"  # or plain, vicuna, a Jinja file

    config.prompts = "shipped"  # see specjax.evaluation.prompts.load_prompts
    config.prompts_fallback = ""
    config.prompts_per_category = 0 if full else 1  # 0 for all
    config.max_prompts = 2 if quick else 0  # 0 for all
    config.long_prompts = "error"  # or skip, which counts them
    config.max_new_tokens = 16 if quick else 64

    config.temperatures = (1.0,) if "sampled" in arguments else (0.0,)
    config.top_k = 0
    config.top_p = 1.0
    config.min_p = 0.0
    config.repetition_penalty = 1.0  # over prompt and answer; 1 is none
    config.presence_penalty = 0.0  # over the answer alone, like the next
    config.frequency_penalty = 0.0
    config.logit_bias = ()  # pairs: ((token id, what to add to its logit), ...)
    config.suppress_tokens = ()  # ids that are never emitted
    config.seed = 0

    # Every row is a drafter with its options; `num_nodes` is swept over. `only` names the rows to keep.
    sweep = full and not quick
    config.rows = {
        "autoregressive": {"name": "autoregressive"},
        "draft": {
            "name": "draft_model",
            "source": DRAFT,
            "num_nodes": (1, 2, 3, 4, 6) if sweep else (3,),
            "rule": "",  # the exact rule that fits best
        },
        "eagle": {
            "name": "eagle",
            "source": EAGLE,
            "num_nodes": (1, 2, 3, 4) if sweep else (2,),
            "rule": "",
        },
        "eagle3": {
            "name": "eagle3",
            "source": EAGLE3,
            "num_nodes": (1, 2, 3, 4) if sweep else (2,),
            "rule": "",
        },
        "hydra": {"name": "hydra", "source": HYDRA, "tree": "chain", "nodes": 2, "rule": ""},
        "prompt_lookup": {
            "name": "prompt_lookup",
            "num_nodes": (2, 3, 4, 6) if sweep else (3,),
            "max_ngram": 3,
            "min_ngram": 1,
            "rule": "",
        },
    }
    if full:
        config.rows.update(others())
    config.only = ()

    config.batch = 1
    config.repeats = 1 if full or quick else 2
    config.layout = "packed"  # for few rows on a CPU; `plain` on accelerators
    config.mesh = {"data": 1, "fsdp": 1, "tensor": 1, "target": "fsdp_tp", "drafter": "dp"}  # -1: the other devices
    config.precision = "float32"
    config.near_tie_bound = 0.0  # 0: from dtype and precision
    config.loop_threshold = 0.4
    config.coloured_texts = 3
    return config


def others() -> dict[str, dict]:
    """Rows of the methods that `full` adds, one setting each; configs/self_drafting.py and ensembles.py have more."""
    draft, lookup = {"name": "draft_model", "source": DRAFT}, {"name": "prompt_lookup", "num_nodes": 3}
    members = (draft | {"num_nodes": 2}, lookup)
    rows = {
        "draft_tree": {"name": "draft_tree", "source": DRAFT, "branching": (2, 1, 1)},
        "eagle2": {"name": "eagle2", "source": EAGLE, "num_nodes": 7, "levels": 4, "top_k": 3},
        "eagle3_tree": {"name": "eagle3", "source": EAGLE3, "num_nodes": 7, "levels": 4, "top_k": 3},
        "medusa": {"name": "medusa", "source": MEDUSA, "tree": "chain", "nodes": 2},
        "medusa_tree": {"name": "medusa", "source": MEDUSA, "tree": "calibrated", "nodes": 7},
        "hydra_tree": {"name": "hydra", "source": HYDRA, "tree": "calibrated", "nodes": 7},
        "suffix": {"name": "suffix", "num_nodes": 4},
        "suffix_tree": {"name": "suffix_tree", "num_nodes": 6, "depth": 4},
        "recycling": {"name": "recycling", "num_nodes": 8},
        "lookahead": {"name": "lookahead", "window": 3, "ngram": 3, "guesses": 3},
        "jacobi": {"name": "jacobi", "num_nodes": 4},
        "layer_skip": {"name": "layer_skip", "skip": tuple(range(8, 28, 2)), "num_nodes": 2},
        "early_exit": {"name": "early_exit", "exit_layer": 4, "num_nodes": 2},
        "adaptive": {"name": "adaptive", "inner": draft | {"num_nodes": 4}, "widths": (0, 2, 4), "draft_cost": 0.07},
        "union": {"name": "ensemble_union", "members": members, "stacked": False},
        "mixture": {"name": "ensemble_mixture", "members": members, "num_nodes": 2, "stacked": False},
    }
    return {label: row | {"rule": ""} for label, row in rows.items()}
