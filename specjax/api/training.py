"""Training in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from specjax import build
from specjax.api.loading import load_drafter
from specjax.build import Drafting
from specjax.evaluation import results


def train(
    config: Any,
    workdir: str | Path | epath.Path,
    *,
    data: str | Path,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    report: Callable[[int, dict[str, float]], None] = lambda step, values: None,
) -> Drafting:
    """Trains a drafter as `experiments.train` does, from the newest checkpoint of the run directory where there is one.

    Args:
        config: from `load_config`, or the path of its file, `configs/distill.py:smollm2` for instance.
        workdir: run directory; the best checkpoint becomes a drafter in `drafter/` within it.
        data: directory that the config's text is relative to.
        overrides: of a config given by path, as in `load_config`.
        report: called with step and metrics at every logged step and evaluation.

    Returns:
        The trained drafter, with the options that its method has by default.

    Raises:
        FileNotFoundError: config, text, store or the run to start from is missing.
        PermissionError: the run directory cannot be written.
        ValueError: an option is unknown or out of range, or the directory belongs to another config, target,
            tokenizer or data.
        FloatingPointError: a loss or gradient is not finite.
    """
    if isinstance(config, str | Path):
        config = build.load_config(config, overrides=overrides)
    elif overrides:
        raise ValueError("overrides are for a config given by its path; change the loaded one itself")
    if not str(workdir).strip():
        raise ValueError("workdir is empty; expected a directory")
    workdir = epath.Path(workdir)
    results.check_writable(workdir)
    target = build.target_from_config(config.target)
    trainer = build.build_training(config, target, Path(data))
    start = build.start_of(config, target, workdir)
    trainer.run(workdir, config.to_dict(), init=start, report=report)
    build.export_drafter(config, target, trainer, workdir)
    return load_drafter(str(workdir), target)
