"""Trains a drafter: python -m experiments.train --config=configs/distill.py:smollm2 --workdir=runs/distill.

The same command resumes; SIGTERM saves and ends with exit code 75, which schedulers take as "start it again".
SPECJAX_DATA names the directory of the training text. At the end the best checkpoint is written as a drafter to
`drafter/` in the run directory, where every program finds it.

--wandb=offline or online also sends the metrics to Weights & Biases (`pip install 'specjax[wandb]'`); a resumed run
goes on there under the same id, with no step twice. `wandb sync` uploads what was kept offline.
--tensorboard also writes them to `tensorboard/` in the run directory (`pip install 'specjax[tensorboard]'`).
"""

from __future__ import annotations

import signal

import jax
import ml_collections
from absl import flags, logging

from experiments import _main
from experiments._decoding import with_decoding
from experiments._progress import progress
from specjax import build
from specjax.evaluation import results
from specjax.training.tracking import MODES, tensorboard_sink, wandb_sink

WANDB = flags.DEFINE_enum("wandb", "disabled", MODES, "whether Weights & Biases gets the metrics too")
TENSORBOARD = flags.DEFINE_bool("tensorboard", False, "whether TensorBoard gets the metrics too")
PROJECT = flags.DEFINE_string("wandb_project", "specjax", "of Weights & Biases")


def main(config: ml_collections.ConfigDict) -> None:
    """Builds the trainer and runs it."""
    logging.set_verbosity(logging.WARNING)  # Orbax tells of every file it writes.
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ending.append(number))
    config_dict, workdir = config.to_dict(), _main.workdir()
    if jax.process_index() == 0:
        results.check_writable(workdir)
    target = build.placed_target(config)
    trainer = build.build_training(config, target, _main.data_dir())
    trainer = with_decoding(trainer, config, target, _main.console())
    start = build.start_of(config, target, workdir)
    trainer.claim(workdir, config_dict)  # Before a tracker goes on with the run that the directory names.
    with (
        progress("training", trainer.config.steps) as report,
        wandb_sink(workdir, config_dict, mode=WANDB.value, project=PROJECT.value) as wandb,
    ):
        sinks = (*wandb, *tensorboard_sink(workdir, wanted=TENSORBOARD.value))
        state = trainer.run(workdir, config_dict, init=start, sinks=sinks, report=report, stop=lambda: bool(ending))
    # The same for all processes, whichever of them was told to end.
    interrupted = int(state.step) < trainer.config.steps
    if jax.process_index() == 0:
        step = build.export_drafter(config, target, trainer, workdir)
        print(f"{'interrupted, saved' if interrupted else 'done'}: {workdir}; drafter/ is step {step}")
    if interrupted:
        raise SystemExit(_main.RESTART)


if __name__ == "__main__":
    _main.run(main, config="configs/distill.py", workdir="runs/distill")
