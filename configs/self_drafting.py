"""Drafting without a trained head: lookahead, n-grams, the target's own layers, adaptive lengths; batch 1.

    python -m experiments.benchmark --config=configs/self_drafting.py --workdir=runs/self_drafting

Arguments, separated by commas:
    spec_bench  10 prompts of each category of Spec-Bench, read from SPECJAX_DATA, in place of the shipped prompts
    sampled     at temperature 1 in place of greedy
    quick       2 prompts, 16 tokens: whether it works at all
"""

from ml_collections import config_dict

# The zoo entry, or the path of a trained drafter, of the rows `draft` and `kangaroo`; empty leaves them out.
DRAFT = "smollm2-135m-distilled"
KANGAROO = "smollm2-135m-kangaroo"
# Every other layer of the middle, a starting point that was not searched for: experiments/search_skip.py finds a set.
SKIP = (8, 10, 12, 14, 16, 18, 20, 22, 24, 26)

ARGUMENTS = ("spec_bench", "sampled", "quick")


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    arguments = [a for a in (arg or "").split(",") if a]
    unknown = [a for a in arguments if a not in ARGUMENTS]
    if unknown:
        raise ValueError(f"unknown argument {unknown[0]!r} of configs/self_drafting.py; known: {', '.join(ARGUMENTS)}")
    quick, published = "quick" in arguments, "spec_bench" in arguments

    config = config_dict.ConfigDict()
    config.target = {"source": "smollm2", "dtype": "float32"}
    config.system_prompt = config_dict.placeholder(str)

    config.prompts = "spec_bench:$SPECJAX_DATA/spec_bench/question.jsonl" if published else "shipped"
    config.prompts_fallback = "shipped"
    config.prompts_per_category = 10 if published else 0
    config.max_prompts = 2 if quick else 0
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

    config.rows = rows(quick)
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


def rows(quick: bool) -> dict:
    """What is compared. Adaptive lengths stand beside fixed ones, the least, one between and the greatest."""

    def lengths(*sizes: int) -> tuple[int, ...]:
        return sizes[-1:] if quick else sizes

    found = {
        "autoregressive": {"name": "autoregressive"},
        # A small window for a processor on which wide passes are dear, the code's example, the paper's for 7B models.
        "lookahead_3_3_3": {"name": "lookahead", "window": 3, "ngram": 3, "guesses": 3},
        "lookahead_7_5_7": {"name": "lookahead", "window": 7, "ngram": 5, "guesses": 7},
        "lookahead_15_5_15": {"name": "lookahead", "window": 15, "ngram": 5, "guesses": 15},
        "jacobi": {"name": "jacobi", "num_nodes": 4},
        "prompt_lookup": {"name": "prompt_lookup", "num_nodes": 3},
        "suffix": {"name": "suffix", "num_nodes": lengths(3, 6, 8)},
        "suffix_tree": {"name": "suffix_tree", "num_nodes": 8, "depth": 4},
        "recycling": {"name": "recycling", "num_nodes": 12},
        # A store that experiments.build_store wrote, or a text file; empty leaves the row out.
        "retrieval": {"name": "retrieval", "source": "", "num_nodes": 8, "depth": 4},
        "early_exit": {"name": "early_exit", "exit_layer": 4, "num_nodes": 3},
        "early_exit_sure": {"name": "early_exit", "exit_layer": 4, "num_nodes": 3, "min_confidence": 0.5},
        "layer_skip": {"name": "layer_skip", "skip": SKIP, "num_nodes": 3},
        # Every other attention of the middle; MLPs are named with skip_mlp.
        "layer_skip_attention": {"name": "layer_skip", "skip_attention": SKIP, "num_nodes": 3},
        # The search.json of experiments.search_skip; empty leaves the row out.
        "layer_skip_searched": {"name": "layer_skip", "source": "", "num_nodes": 3},
        # The zoo entry, or the run directory, of an adapter (configs/kangaroo.py); empty leaves the row out.
        "kangaroo": {"name": "kangaroo", "source": KANGAROO, "num_nodes": 6, "min_confidence": 0.6},
        # Any model, whatever its tokenizer, such as $SPECJAX_DATA/models_tiny/stories260K.bin; empty leaves it out.
        "other_tokenizer": {"name": "other_tokenizer", "source": "", "num_nodes": 3},
        "adaptive_suffix": {
            "name": "adaptive",
            "inner": {"name": "suffix", "num_nodes": 8},
            "widths": (0, 3, 8),
            "draft_cost": 0.0,
        },
    }
    if not DRAFT:
        return found
    draft = {"name": "draft_model", "source": DRAFT}
    bad = {"name": "experiments._degraded:noisy_draft_model", "source": DRAFT, "noise": 3.0}
    # c of the row draft, and what a further token adds to a pass there, (t ratio - 1) / num_nodes.
    adaptive = {"name": "adaptive", "widths": (0, 2, 4), "draft_cost": 0.07, "pass_cost": 0.1}
    return found | {
        # For comparison: a second model, ones that stop where they are unsure, and one that is never right.
        "draft": {**draft, "num_nodes": lengths(2, 3, 4)},
        "draft_sure": {**draft, "num_nodes": 4, "min_confidence": 0.4},
        "draft_low_entropy": {**draft, "num_nodes": 4, "max_entropy": 2.0},
        "draft_bad": {**bad, "num_nodes": 4},
        "adaptive_draft": {**adaptive, "inner": {**draft, "num_nodes": 4}},
        "adaptive_draft_bad": {**adaptive, "inner": {**bad, "num_nodes": 4}},
    }
