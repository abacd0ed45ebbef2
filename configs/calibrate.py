"""Calibrates heads of other projects for trees: settings of experiments.calibrate.

    python -m experiments.calibrate --config=configs/calibrate.py:smollm2 --config.source=org/some-medusa \
      --config.to=heads/calibrated

The argument is the target that the heads belong to.
"""

from ml_collections import config_dict


def get_config(arg: str = "smollm2") -> config_dict.ConfigDict:
    """The config of one calibration."""
    config = config_dict.ConfigDict()
    config.target = {"source": arg, "dtype": "float32"}
    config.source = ""  # heads of Medusa or Hydra, in any layout that is read
    config.to = ""  # a directory; what is saved is a drafter of specjax
    config.store = "runs/hidden/smollm2/greedy"  # hidden states of greedy text
    config.rows = 0  # of the store, at most; 0 for all
    config.batch = 1  # rows at a time; what a last batch lacks is left out
    config.ranks = 4
    return config
