"""At which confidence a draft had better stop: the option `min_confidence` of the row that it is for.

    python -m experiments.stop_early --config=configs/stop_early.py

Other drafters with that option: --config.rows.draft.name=kangaroo --config.rows.draft.source=runs/kangaroo, for
instance; `num_nodes` is the longest draft that is considered. The argument `quick` takes 2 prompts of 16 tokens.
"""

from ml_collections import config_dict


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    if arg not in (None, "", "quick"):
        raise ValueError(f"unknown argument {arg!r} of configs/stop_early.py; known: quick")
    quick = arg == "quick"
    config = config_dict.ConfigDict()
    config.target = {"source": "smollm2", "dtype": "float32"}
    config.system_prompt = config_dict.placeholder(str)  # None: what the chat template says

    config.prompts = "shipped"  # see specjax.evaluation.prompts.load_prompts
    config.prompts_fallback = ""
    config.prompts_per_category = 1
    config.max_prompts = 2 if quick else 0  # 0 for all
    config.long_prompts = "error"  # or skip, which counts them
    config.max_new_tokens = 16 if quick else 64

    config.temperatures = (1.0,)  # one above 0: greedy drafts keep no law to read a confidence from
    config.top_k = 0
    config.top_p = 1.0
    config.seed = 0
    config.rows = {
        "autoregressive": {"name": "autoregressive"},
        "draft": {"name": "draft_model", "source": "smollm2-135m-distilled", "num_nodes": 6, "rule": ""},
    }
    config.only = ()

    config.rounds = 2 if quick else 9  # of the timings
    config.repeat = 2 if quick else 4  # passes between two readings of the clock
    config.layout = "packed"  # for few rows on a CPU; `plain` on accelerators
    config.precision = "float32"
    return config
