"""What `python -m experiments.profile_rules` times. The argument `quick` takes small drafts and few rounds."""

from ml_collections import config_dict


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    if arg not in (None, "", "quick"):
        raise ValueError(f"unknown argument {arg!r} of configs/profile_rules.py; known: quick")
    quick = arg == "quick"
    config = config_dict.ConfigDict()
    # Measured as the step that overheads are a share of; empty for none. For another vocabulary than its own, its
    # embedding and head are given as many rows.
    config.target = {"source": "smollm2", "dtype": "float32"}
    config.layout = "packed"
    config.vocabularies = (49152,) if quick else (49152, 128256)
    # Milliseconds of a step with each vocabulary; 0 for the target's, measured.
    config.step_ms = (0.0,) if quick else (0.0, 0.0)
    # Children of every node at each depth: N = 0, 8 and 63.
    config.trees = {"0": (), "8": (1,) * 8} if quick else {"0": (), "8": (1,) * 8, "63": (3, 4, 4)}
    config.rules = ("greedy", "one_hot", "recursive", "block", "traversal", "k_seq", "typical", "lenient", "threshold")
    config.processors = ("temperature", "top_k", "top_p", "min_p", "penalties", "logit_bias", "suppress_tokens")
    config.noise = 0.5  # of the draft's logits over the target's: how often they agree decides how far a walk goes
    config.valid_length = 128
    config.batch = 1
    config.rounds = 1 if quick else 9
    config.repeat = 1 if quick else 4  # calls between two readings of the clock
    config.precision = "float32"
    config.seed = 0
    return config
