"""Verification rules side by side on the same random tables; needs no model.

    python -m experiments.acceptance --config=configs/acceptance.py

Small tables are enumerated exactly; on larger ones drafts are drawn, and each draft's acceptance is still exact. The
argument `quick` takes a few tables and drafts.
"""

from ml_collections import config_dict


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    if arg not in (None, "", "quick"):
        raise ValueError(f"unknown argument {arg!r} of configs/acceptance.py; known: quick")
    quick = arg == "quick"
    config = config_dict.ConfigDict()
    config.tables = 3 if quick else 8  # pairs of random laws, p and q
    config.likeness = 0.5  # q is this share of p, and the rest a law of its own
    config.seed = 0
    # Children of every node at each depth.
    config.trees = {
        "chain of 1": (1,),
        "chain of 3": (1, 1, 1),
        "3 children": (3,),
        "2 children, 1 each": (2, 1),
    }
    config.exact_vocab = 3
    config.sampled_vocab = 24
    config.drafts = 8 if quick else 32  # drawn a table, where it is not enumerated
    return config
