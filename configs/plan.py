"""What to draft on this machine: python -m experiments.plan --config=configs/plan.py:smollm2

Acceptance is measured on the first prompts of each category, with each row's longest draft; the others check the plan.

Arguments, separated by commas:
    smollm2   the target (also the default)
    quick     few prompts, shapes and rounds: whether it works at all
    sweep     checks every draft length beside the plan's, 1 to 10, and 6 trees (hours on a small machine)
    batches   plans and checks at batch 1, 2, 4 ... 64: tokens/s of plain decoding and of the plan
"""

import itertools

from ml_collections import config_dict

# The zoo entry, or the path of a trained drafter, that the row `draft` plans with; empty leaves the row out.
DRAFT = "smollm2-135m-distilled"

EAGLE3 = "smollm2-135m-eagle3"
# Acceptance by rank needs a full tree: 3 children of the root, 2 below each of them, then chains.
BRANCHING = (3, 2, 1, 1)
TREE = tuple(path for depth in range(1, 5) for path in itertools.product(*map(range, BRANCHING[:depth])))

ARGUMENTS = ("smollm2", "quick", "sweep", "batches")


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    arguments = [a for a in (arg or "").split(",") if a]
    unknown = [a for a in arguments if a not in ARGUMENTS]
    if unknown:
        raise ValueError(f"unknown argument {unknown[0]!r} of configs/plan.py; known: {', '.join(ARGUMENTS)}")
    quick, sweep = "quick" in arguments, "sweep" in arguments

    config = config_dict.ConfigDict()
    config.target = {"source": "smollm2", "dtype": "float32"}
    config.system_prompt = config_dict.placeholder(str)  # None: what the chat template says
    config.template = "chat"  # or plain, vicuna, a Jinja file

    config.prompts = "shipped:writing,code" if quick else "shipped"  # see specjax.evaluation.prompts.load_prompts
    config.prompts_fallback = ""
    config.prompts_per_category = 2
    config.max_prompts = 0  # 0 for all
    config.long_prompts = "error"  # or skip, which counts them
    config.calibration_per_category = 1  # the rest checks the plan
    config.max_new_tokens = 16 if quick else 64

    config.temperatures = (0.0,)  # one
    config.top_k = 0
    config.top_p = 1.0
    config.seed = 0

    # Drafts of `num_nodes` are timed, those between are interpolated; the longest gives the acceptance. A row with a
    # static tree (Medusa's heads: tree='choices') gives acceptance by rank, and may be planned any tree within it.
    lengths = (1, 4) if quick else tuple(range(1, 11)) if sweep else (1, 2, 4, 8)
    config.rows = {
        "autoregressive": {"name": "autoregressive"},
        "draft": {"name": "draft_model", "source": DRAFT, "num_nodes": lengths, "rule": ""},
        "prompt_lookup": {
            "name": "prompt_lookup",
            "num_nodes": lengths,
            "max_ngram": 3,
            "min_ngram": 1,
            "rule": "",
        },
    }
    if not quick:
        head = {"name": "eagle3", "source": EAGLE3, "rule": ""}
        config.rows["eagle3"] = {**head, "num_nodes": lengths}
        config.rows["eagle3_tree"] = {**head, "choices": TREE}
    config.only = ()

    # Target passes are timed over these tokens, at every batch size and context; drafts are limited to what they cover.
    config.tokens = (1, 2, 5) if quick else (1, 2, 3, 4, 5, 6, 8, 9, 11, 16, 22)
    batches = (1, 2) if quick else (1, 2, 4, 8, 16, 32, 64)
    config.batches = batches if "batches" in arguments else (1,)
    config.contexts = (128,)  # the first is that of the check
    config.rounds = 2 if quick else 9
    # Predicted speedups up to 1 + margin do not pay; None: as much as the timings' noise.
    config.margin = config_dict.placeholder(float)

    config.check = "sweep" if sweep else "plan"  # what is measured on the other prompts: plan, sweep or none
    config.batch = 1
    config.repeat = 2 if quick else 4  # passes between two readings of the clock
    config.repeats = 1 if quick else 2
    config.layout = "packed"  # for few rows on a CPU; `plain` on accelerators
    config.precision = "float32"
    config.near_tie_bound = 0.0  # 0: from dtype and precision
    config.loop_threshold = 0.4
    return config
