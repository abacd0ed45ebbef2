"""Counts at which rank the tokens to come stand at the heads of Medusa or Hydra, so that their trees can be calibrated.

    python -m experiments.calibrate --config=configs/calibrate.py:smollm2 --config.source=org/some-medusa \
      --config.to=heads/calibrated

For heads of other projects; those that are trained here are calibrated by their training. Reads the hidden-state store
of greedy text that `experiments.hidden_states` writes. The heads that it saves draft with `tree=calibrated`. Settings:
configs/calibrate.py.
"""

from __future__ import annotations

import ml_collections
import numpy as np
from etils import epath

from experiments import _main
from specjax import build
from specjax.checkpoints.drafters import save_drafter
from specjax.checkpoints.formats import read_head
from specjax.training import HiddenStates
from specjax.training.calibration import calibrate


def main(config: ml_collections.ConfigDict) -> None:
    """Reads, counts, saves, shows."""
    for name in ("source", "to"):
        if not config[name]:
            raise ValueError(f"{name} is missing: --config.source=<heads> --config.to=<a directory>")
    if (epath.Path(config.to) / "config.json").exists():
        raise ValueError(f"{config.to} holds a model already: choose another directory, or remove it")
    target = build.target_from_config(config.target)
    drafter = read_head(config.source, target)
    store = HiddenStates(config.store, target)
    # Batches of one shape: what is left over at the end is left out.
    count = min(config.rows or store.rows, store.rows) // config.batch
    rows = np.arange(count * config.batch).reshape(count, config.batch)
    calibrated = calibrate(drafter, target, (store.batch(part) for part in rows), config.ranks)
    save_drafter(config.to, calibrated, target, drafter.info.get("dtype", "bfloat16"))
    console = _main.console()
    for head, row in enumerate(np.asarray(calibrated.tables["accuracy"])):
        console.print(f"head {head}: " + " ".join(f"{share:.3f}" for share in row), highlight=False)
    console.print(f"{config.to}: over {calibrated.info['calibration_positions']} positions")


if __name__ == "__main__":
    _main.run(main, config="configs/calibrate.py")
