"""The progress bar of a training: steps, tokens a second, model FLOP utilisation, time left; metrics above it."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Mapping

import jax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from specjax.training.pace import peak_flops

# Said by the bar, or of interest to programs alone: accuracies by rank are many, and for the trees built from them.
_UNSAID = ("second", "mfu", "rank_", "loss_positions", "input_tokens")


@contextlib.contextmanager
def progress(name: str, steps: int) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """A context with the `report` of a trainer. Of several processes the first speaks for all.

    Args:
        name: of what is done.
        steps: at which it ends.
    """
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[pace]}")]
    speaks = jax.process_index() == 0
    with Progress(*columns, disable=not speaks) as bar:
        task = bar.add_task(name, total=steps, pace="")
        if speaks and peak_flops(device := jax.local_devices()[0]) is None:
            bar.console.print(f"no MFU is given: the peak of {device.device_kind!r} is not known", highlight=False)

        def report(step: int, values: Mapping[str, float]) -> None:
            if not speaks:
                return
            bar.update(task, completed=step)
            if said := pace(values):
                bar.update(task, pace=said)
            shown = {k.removeprefix("train/"): v for k, v in values.items() if not any(word in k for word in _UNSAID)}
            bar.console.print(f"step {step}  {'  '.join(f'{key} {value:.4g}' for key, value in shown.items())}")

        yield report


def pace(values: Mapping[str, float]) -> str:
    """Tokens a second, those that carry loss in brackets, MFU where it is known, time left; empty without any."""
    if "train/eta_seconds" not in values:
        return ""
    tokens, losses = (values[f"train/{name}_per_second"] for name in ("input_tokens", "loss_positions"))
    parts = [f"{tokens:,.0f} tokens/s ({losses:,.0f} with loss)"]
    if "train/mfu" in values:
        parts.append(f"MFU {values['train/mfu']:.1%}")
    return "  ".join([*parts, f"ETA {datetime.timedelta(seconds=round(values['train/eta_seconds']))}"])
