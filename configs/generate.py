"""How `python -m experiments.generate` answers.

The argument says what drafts: `lookup` (prompt lookup), `plain` (nothing), a zoo entry or the directory of a trained
drafter or training run (whatever its method), or the path of a model with the target's vocabulary.
"""

import difflib

from ml_collections import config_dict

from specjax.checkpoints.drafters import saved_method

# What drafts when nothing is said.
DRAFT = "smollm2-135m-distilled"
WORDS = ("plain", "lookup")
# Of each method that is not left to its maker's defaults.
OPTIONS = {"draft_model": {"num_nodes": 4}, "eagle3": {"num_nodes": 2}}


def get_config(arg: str = DRAFT) -> config_dict.ConfigDict:
    """The config of one answer."""
    if arg not in WORDS and (close := difflib.get_close_matches(arg, WORDS)):
        raise ValueError(f"unknown argument {arg!r} of configs/generate.py; did you mean {close[0]!r}?")
    config = config_dict.ConfigDict()
    config.target = {"source": "smollm2", "dtype": "float32"}
    if arg == "plain":
        config.drafter = {"name": "autoregressive"}
    elif arg == "lookup":
        config.drafter = {"name": "prompt_lookup", "num_nodes": 3}
    else:
        method = saved_method(arg) or "draft_model"
        config.drafter = {"name": method, "source": arg, **OPTIONS.get(method, {})}
    config.rule = ""  # the exact rule that fits best
    config.rule_options = ()  # pairs: (("epsilon", 0.2), ...)
    config.lossless = True  # refuse a rule that changes the output law
    config.system_prompt = config_dict.placeholder(str)  # None: what the chat template says
    config.max_new_tokens = 256
    config.temperature = 0.0
    config.top_k = 0
    config.top_p = 1.0
    config.min_p = 0.0
    config.repetition_penalty = 1.0  # over prompt and answer; 1 is none
    config.presence_penalty = 0.0  # over the answer alone, like the next
    config.frequency_penalty = 0.0
    config.logit_bias = ()  # pairs: ((token id, what to add to its logit), ...)
    config.suppress_tokens = ()  # ids that are never emitted
    config.stop = ()  # strings that end the answer
    config.seed = 0
    config.layout = "packed"  # for few rows on a CPU; `plain` on accelerators
    config.mesh = {"data": 1, "fsdp": 1, "tensor": 1, "target": "fsdp_tp", "drafter": "dp"}  # -1: the other devices
    config.precision = "float32"
    return config
