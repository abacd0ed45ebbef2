"""Small drafts to be members of an ensemble: other text, another depth and another seed each, below 2 M parameters.

    python -m experiments.train --config=configs/ensemble_drafts.py:reasoning --workdir=runs/zoo/ensemble_reasoning
    python -m experiments.train --config=configs/ensemble_drafts.py:code --workdir=runs/zoo/ensemble_code
    python -m experiments.train --config=configs/ensemble_drafts.py:mixed --workdir=runs/zoo/ensemble_mixed

The members of configs/ensembles.py are then those directories, separated by commas. The argument is one of those names
and, behind a comma, the target (`smollm2` by default). They borrow the target's embedding and rows of its head; layers
and the last norm are their own.
"""

from ml_collections import config_dict

from configs import lm

# Sources of the target's text to learn from (all where there are none), layers that a draft begins as, MLP width, seed.
DRAFTS = {
    "reasoning": {"sources": ("gsm8k-train",), "layers": (0,), "intermediate_size": 256, "seed": 11},
    "code": {"sources": ("gpteacher-code", "mbpp"), "layers": (29,), "intermediate_size": 256, "seed": 12},
    "mixed": {"sources": (), "layers": (0, 29), "intermediate_size": 32, "seed": 13},
}


def get_config(arg: str = "mixed") -> config_dict.ConfigDict:
    """The config of one run."""
    name, _, target = arg.partition(",")
    if name not in DRAFTS:
        raise ValueError(f"unknown argument {name!r} of configs/ensemble_drafts.py; known: {', '.join(DRAFTS)}")
    draft = DRAFTS[name]
    config = lm.get_config(target or "smollm2")
    config.data.temperature = -1.0
    config.data.sources = draft["sources"]
    config.objective.layers = draft["layers"]
    config.objective.intermediate_size = draft["intermediate_size"]
    config.train.seed = draft["seed"]
    return config
