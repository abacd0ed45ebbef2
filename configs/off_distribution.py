"""One good draft made worse, a step at a time: when does speculation stop to pay?

    python -m experiments.off_distribution --config=configs/off_distribution.py

Arguments, separated by commas: `quick` (2 prompts of 16 tokens, greedy, one degraded row: whether it works at all), or
a draft model other than the zoo's, a path or hub id.
"""

from ml_collections import config_dict

DRAFT = "smollm2-135m-distilled"
NOISE = (0.05, 0.1, 0.2, 0.4)  # over the standard deviation of each matrix
TEMPERATURES = (0.5, 1.5, 2.0)  # of the draft, times that of the request; rows of T = 1 only


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    arguments = [a for a in (arg or "").split(",") if a]
    quick = "quick" in arguments
    drafts = [a for a in arguments if a != "quick"]
    if len(drafts) > 1:
        raise ValueError(f"argument {arg!r} of configs/off_distribution.py; expected one draft, and perhaps quick")
    draft = drafts[0] if drafts else DRAFT

    config = config_dict.ConfigDict()
    config.target = {"source": "smollm2", "dtype": "float32"}
    config.system_prompt = config_dict.placeholder(str)

    config.prompts = "shipped:writing,code" if quick else "shipped"
    config.prompts_fallback = ""
    config.prompts_per_category = 2
    config.max_prompts = 0
    config.long_prompts = "error"
    config.calibration_per_category = 1  # the rest is measured
    config.max_new_tokens = 16 if quick else 64

    config.temperatures = (0.0,) if quick else (0.0, 1.0)
    config.top_k = 0
    config.top_p = 1.0
    config.seed = 0

    lengths = (1, 4) if quick else (1, 2, 3, 4)  # the planner chooses among them; the longest is measured
    own = {"name": "draft_model", "source": draft, "num_nodes": lengths}
    noisy = {**own, "name": "experiments._degraded:noisy_draft_model"}
    config.rows = {
        "autoregressive": {"name": "autoregressive"},
        "draft": own,
        # The same network trained on text that the target did not write; empty leaves the row out.
        "corpus": {**own, "source": ""},
        **{f"noise {100 * noise:g}%": {**noisy, "noise": noise} for noise in (NOISE[-1:] if quick else NOISE)},
        **{f"draft T {100 * t:g}%": {**own, "temperature": t} for t in (() if quick else TEMPERATURES)},
    }
    config.only = ()
    # How prompts are put to target and draft, and which rows are measured so; none are all.
    both = ("autoregressive", "draft")
    config.templates = {"chat": ()} if quick else {"chat": (), "plain": both, "vicuna": both}

    config.tokens = (1, 2, 5) if quick else (1, 2, 3, 4, 5)
    config.batches = (1,)
    config.contexts = (128,)
    config.rounds = 2 if quick else 9
    config.margin = 0.0
    config.repeat = 2 if quick else 4
    config.repeats = 1 if quick else 2
    config.layout = "packed"
    config.precision = "float32"
    config.near_tie_bound = 0.0
    config.loop_threshold = 0.4
    return config
