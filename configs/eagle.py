"""Trains an EAGLE-1 head: regression of the target's next feature, and its law (Li et al. 2024).

    python -m experiments.hidden_states --config=configs/hidden_states.py:smollm2
    python -m experiments.train --config=configs/eagle.py:smollm2 --workdir=runs/eagle

The head also drafts trees (`eagle2`). The argument is the target: an alias (`smollm2`) or anything else that
`load_target` takes.
"""

from ml_collections import config_dict

from configs import distill


def get_config(arg: str = "smollm2") -> config_dict.ConfigDict:
    """The config of one run."""
    config = distill.get_config(arg)
    config.objective = {
        "name": "eagle",
        "intermediate_size": 768,
        "draft_vocab": 6144,
        "bias": False,  # of the projection: vLLM loads none, and what SGLang needs is written as zeros
        # The draft's layer: as the target's, or `plain`, Llama's, which servers load for whatever target.
        "layer": "target",
        # As published; what is learnt of the law here is all that acceptance depends on.
        "feature_weight": 1.0,
        "law_weight": 0.1,
        "noise": 0.2,  # in a document of 512 tokens; the shorter, the wider
    }
    config.optimizer.update({"warmup": 100, "b1": 0.9, "b2": 0.95, "clip": 0.5})
    config.optimizer.steps = config.train.steps = 3000
    config.train.eval_every = 200
    return config
