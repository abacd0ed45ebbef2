"""Medusa-2: heads and target trained together (Cai et al. 2024), a small model by default.

    python -m experiments.pretrain --config=configs/mtp.py:tiny --workdir=runs/tiny
    python -m experiments.pretrain --config=configs/medusa2.py:tiny --workdir=runs/medusa2

The second line goes on from the first (`init_from`), on the same corpus. In the end `target/` is the new target and
`drafter/` its heads, for drafter `medusa`; `results.json` has the target's perplexity before and after. The heads warm
up alone for `warmup` updates; then both are trained, the heads at 4 times the target's learning rate. Arguments: `tiny`
or `small` (after configs/mtp.py:small); else a target, an alias or anything that `load_target` takes, which is trained
further on its own text.
"""

from ml_collections import config_dict

from configs import layerskip, mtp


def get_config(arg: str = "tiny") -> config_dict.ConfigDict:
    """The config of one run."""
    small = arg in mtp.SIZES
    config = mtp.pretraining(arg, heads=1) if small else layerskip.continued(arg)
    steps = {"tiny": 30, "small": 400}.get(arg, 200)
    config.objective = {
        "name": "medusa2",
        "num_heads": 3,
        "num_layers": 1,
        "weight": 0.2,  # lambda_0
        "warmup": steps // 3,
        "decay": 0.8,  # head i weighs decay^i
        "ranks": 4,  # at which held-out accuracies are counted, for trees
        "anchor": 0.0,  # share of the cross-entropy with the law of the target as it was
    }
    # Weight decay would move a target that is not trained yet.
    config.optimizer.update({"learning_rate": 2e-4, "steps": steps, "warmup": steps // 10, "weight_decay": 0.0})
    config.optimizer.rates = (("heads", 4.0),)
    config.train.steps = steps
    config.train.best = "code/accepted" if small else "greedy/accepted"
    if small:
        config.init_from = f"runs/{arg}"  # a run of configs/mtp.py, whose target to begin with
    return config
