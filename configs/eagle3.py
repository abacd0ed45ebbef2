r"""Trains an EAGLE-3 head: three layers of the target fused, training-time test (Li et al. 2025).

    python -m experiments.hidden_states --config=configs/hidden_states.py:smollm2 --config.store.taps="(2, 15, 27)"
    python -m experiments.train --config=configs/eagle3.py:smollm2 --workdir=runs/eagle3

The store holds the inputs of the target's layers 2, n // 2, n - 3; it serves every other objective too. The paper's
seven steps of training-time test: --config.objective.steps=7. The norms of EAGLE-3.1:
--config.objective.norms="('fc_norm', 'norm_output')", for the layout `speculators`.

    SPECJAX_DATA=gs://bucket/data python -m experiments.train --config=configs/eagle3.py:smollm2,pod \
        --workdir=gs://bucket/eagle3

The argument is the target, and `pod` for many accelerators: rows over all devices, half precision in the target, which
runs in the step, so that hosts need no store. 256 rows divide over any slice of up to 256 chips.
"""

from ml_collections import config_dict

from configs import distill


def get_config(arg: str = "smollm2") -> config_dict.ConfigDict:
    """The config of one run."""
    source, _, place = arg.partition(",")
    if place not in ("", "pod"):
        raise ValueError(f"argument {arg!r} of configs/eagle3.py; expected a target, and 'pod' or nothing after it")
    config = distill.get_config(source)
    config.objective = {
        "name": "eagle3",
        # The draft's layer: as the target's, or `plain`, Llama's, which servers load for whatever target.
        "layer": "target",
        "intermediate_size": 1536,
        "draft_vocab": 6144,
        "taps": (),  # empty: layers 2, n // 2, n - 3
        "norms": (),
        "steps": 3,
        "decay": 0.8,
        "own_head": False,  # True: a trained head [d, Vd] of its own, as published, instead of the target's rows
    }
    config.optimizer.update({"warmup": 100, "b1": 0.9, "b2": 0.95, "clip": 0.5})
    config.optimizer.steps = config.train.steps = 3000
    config.train.eval_every = 200
    config.train.best = "greedy/accepted"
    if place:
        config.mesh.data = -1
        config.data.online = True
        config.target.dtype, config.train.precision = "bfloat16", "default"
        config.train.batch, config.train.log_every = 256, 20
    return config
