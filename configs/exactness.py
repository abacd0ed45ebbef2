"""Certificates of exactness: every registered drafter, every rule, every planted fault.

    python -m experiments.exactness --config=configs/exactness.py

On a target with four tokens a million sequences of three are held against the law that the target states for each of
the 64. Arguments:
    quick    65,536 sequences, and power against a larger deviation
    smollm2  on SmolLM2-135M-Instruct, for every drafter of the zoo: greedy texts, and the law of the next two tokens
    <path>   the same on any other model

    python -m experiments.exactness --config=configs/exactness.py:smollm2 --config.drafter.source=runs/my_draft
"""

import difflib

from ml_collections import config_dict


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    config = config_dict.ConfigDict()
    config.seed = 0
    config.shard = "0/1"  # i/n: every n-th case from the i-th on, for n processes with a core and a workdir each
    config.only = ()  # drafters, rules or faults to keep, by name; all where empty
    config.temperature = 1.2
    config.top_k = 3
    config.top_p = 0.98
    if arg in (None, "", "quick"):
        quick = arg == "quick"
        config.target = {"source": "", "dtype": "float32"}  # none: the one with four tokens
        config.draws = 1 << 16 if quick else 1_000_000
        config.tv = 0.025 if quick else 0.01
        config.rows = 1 << 9  # more fall out of a core's cache
        config.parts = ("drafters", "rules", "faults")
        return config
    if difflib.get_close_matches(arg, ["quick"]):
        raise ValueError(f"unknown argument {arg!r} of configs/exactness.py; did you mean 'quick'?")
    config.target = {"source": arg, "dtype": "float32"}
    config.top_k, config.top_p = 0, 1.0
    config.temperature = 1.0
    config.min_p = 0.0
    config.repetition_penalty = 1.0  # this and what follows also of the greedy texts
    config.presence_penalty = 0.0
    config.frequency_penalty = 0.0
    config.logit_bias = ()  # pairs: ((token id, what to add to its logit), ...)
    config.suppress_tokens = ()  # ids that are never emitted
    # Beside the zoo's.
    config.drafters = {"prompt_lookup": {"name": "prompt_lookup", "num_nodes": 3}}
    # One more, to be named on the command line: method and source, or a source alone (a zoo entry, a drafter's or run's
    # directory). Where it is given, it is the only one.
    config.drafter = {"name": "", "source": "", "num_nodes": 0}
    config.rule = ""  # above temperature 0; empty for the exact rule that fits best
    config.rule_options = ()  # pairs: (("epsilon", 0.2), ...)
    config.layout = ""  # of the weights; empty for what specjax.generate decodes with
    config.precision = "float32"
    config.contexts = 1  # prompts whose next-token law is certified
    config.draws = 0  # 0: as many as power 0.99 needs against `tv`
    config.tv = 0.1
    config.rows = 0  # that run together; 0 for as many as keep to the products that one text is decoded with
    config.greedy_prompts = 8
    config.max_new_tokens = 32
    return config
