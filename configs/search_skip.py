"""A search for the layers and sublayers that drafting can skip.

    python -m experiments.search_skip --config=configs/search_skip.py:smollm2

Arguments, separated by commas: a target (`smollm2`, or anything that load_target reads), and `quick` for 2 prompts of
16 tokens and 4 trials.
"""

from ml_collections import config_dict


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    arguments = [a for a in (arg or "").split(",") if a]
    quick = "quick" in arguments
    targets = [a for a in arguments if a != "quick"]
    if len(targets) > 1:
        raise ValueError(f"unknown argument {targets[1]!r} of configs/search_skip.py; known: a target, and quick")
    config = config_dict.ConfigDict()
    config.target = {"source": targets[0] if targets else "smollm2", "dtype": "float32"}

    # Greedy answers of the target to training prompts, in SPECJAX_DATA; without them, it answers prompts here.
    config.text = "" if targets and targets[0] != "smollm2" else "target_text/smollm2-135m-instruct.train.jsonl.gz"
    config.max_texts = 2 if quick else 32
    config.max_prompt_tokens = 128
    config.prompts = "shipped"  # see specjax.evaluation.prompts.load_prompts
    config.prompts_fallback = ""
    config.prompts_per_category = 1
    config.max_prompts = 2 if quick else 0
    config.max_new_tokens = 16 if quick else 64

    config.trials = 4 if quick else 120
    config.parts = "sublayers"  # attentions and MLPs by themselves; or layers, whole ones
    config.max_skipped = 0  # of these; 0: all but one
    config.num_nodes = 3  # tokens of a draft
    config.rounds = 2 if quick else 15  # of the timings
    config.seed = 0
    config.layout = "packed"  # for few rows on a CPU; `plain` on accelerators
    config.precision = "float32"
    return config
