"""How fast training goes: positions and tokens a second, model FLOP utilisation, time left."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from specjax.parallel.slices import CHIPS

# Dense bfloat16 operations a second by `jax.Device.device_kind`, which is compared as a whole: a part of a card (MIG),
# or a card with a similar name, has other figures. NVIDIA's are from the data sheets, half of what those give with
# sparsity.
PEAK_FLOPS = {
    "TPU v4": CHIPS["v4"].flops,
    "TPU v5 lite": CHIPS["v5e"].flops,
    "TPU v5e": CHIPS["v5e"].flops,
    "TPU v5": CHIPS["v5p"].flops,
    "TPU v5p": CHIPS["v5p"].flops,
    "TPU v6 lite": CHIPS["v6e"].flops,
    "TPU v6e": CHIPS["v6e"].flops,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
}

# What hides products from the count, or runs them a number of times that a trace does not know.
_HIDDEN = (
    "pallas_call",
    "ffi_call",
    "ragged_dot_general",
    "scaled_matmul_wrapper",
    "conv_general_dilated",
)


def peak_flops(device: jax.Device) -> float | None:
    """Dense bfloat16 operations a second of a known accelerator; None for a CPU and for kinds that are not known."""
    return PEAK_FLOPS.get(device.device_kind)


@dataclasses.dataclass(frozen=True)
class StepFlops:
    """Operations in the matrix products of one update, on all devices together.

    Attributes:
        fixed: what every update does.
        on_loss: what it does besides where every position carries loss; objectives skip chunks of positions without.
    """

    fixed: int
    on_loss: int

    def at(self, share: float) -> float:
        """Operations where this share of positions carries loss."""
        return self.fixed + share * self.on_loss


def step_flops(jaxpr: ClosedJaxpr) -> StepFlops:
    """Counts the products of a traced update.

    Each is 2 * batch * m * n * k, times the length of the scans around it. The branches of a `cond` give the two ends
    of the range. Element-wise work counts nothing, and attention counts whole, masked positions included.

    Raises:
        ValueError: the trace has a loop of unknown length around a product, or a kernel that cannot be looked into.
    """
    least, most = _products(jaxpr.jaxpr)
    return StepFlops(least, most - least)


def _products(jaxpr: Jaxpr) -> tuple[int, int]:
    """Fewest and most operations."""
    least = most = 0
    for eqn in jaxpr.eqns:
        low, high = _of_equation(eqn)
        least, most = least + low, most + high
    return least, most


def _of_equation(eqn: JaxprEqn) -> tuple[int, int]:
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        left, out = (var.aval for var in (eqn.invars[0], eqn.outvars[0]))
        assert isinstance(left, ShapedArray) and isinstance(out, ShapedArray)
        flops = 2 * math.prod(out.shape) * math.prod(left.shape[i] for i in contracted)
        return flops, flops
    if name in _HIDDEN:
        raise ValueError(f"the operations of a {name!r} in the step cannot be counted")
    if name == "cond":
        counts = [_products(branch.jaxpr) for branch in eqn.params["branches"]]
        return min(low for low, _ in counts), max(high for _, high in counts)
    inner_counts = [_products(inner) for inner in _within(eqn)]
    low, high = (sum(ends) for ends in zip((0, 0), *inner_counts, strict=True))
    if name == "while" and high:
        raise ValueError("the step has matrix products in a loop whose length is not known beforehand")
    times = eqn.params["length"] if name == "scan" else 1
    if name == "shard_map":  # Its shapes are those of one device's part, on the axes that it splits by hand.
        times = math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["manual_axes"])
    return times * low, times * high


def _within(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The programs that an equation calls."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item


class Pace:
    """Times the updates between one report and the next, and those of the session for the time that is left.

    It begins after the first update of a session, which compiles. What evaluations and checkpoints take is part of the
    time left, and of no rate.
    """

    def __init__(self, begun: int, steps: int, flops: StepFlops | None, peak: float | None):
        """Starts the clocks.

        Args:
            begun: last update that is not timed.
            steps: at which training ends.
            flops: of an update, None where they are not known.
            peak: operations a second of all devices together, None where it is not known.
        """
        self._begun, self._steps, self._flops, self._peak = begun, steps, flops, peak
        self._start = self._clock = time.monotonic()

    def figures(self, made: Sequence[tuple[int, dict[str, Any]]], shape: tuple[int, int]) -> dict[str, float]:
        """Rates since the last report, by name; empty where no update of them was timed.

        `mfu` is model FLOP utilisation (PaLM, Chowdhery et al. 2022, appendix B):

            operations of an update * updates a second / (devices * dense bfloat16 peak of one)

        with the operations counted in the traced update (`step_flops`): 6 * the draft's parameters in products *
        tokens, plus attention; what runs of the target adds 2 a parameter, or 4 where gradients pass through it to the
        draft, as through its head. Padding within rows counts. The peak is bfloat16's whatever the precision.

        Args:
            made: numbers and metrics of the updates, each with `loss_positions` and `input_tokens`.
            shape: rows and positions of a batch, padding included.
        """
        now = time.monotonic()
        timed = [metrics for step, metrics in made if step > self._begun]
        if not timed:
            return {}
        seconds, last = now - self._clock, made[-1][0]
        losses = sum(float(metrics["loss_positions"]) for metrics in timed)
        found = {
            "rows_per_second": len(timed) * shape[0] / seconds,
            "loss_positions_per_second": losses / seconds,
            "input_tokens_per_second": sum(float(metrics["input_tokens"]) for metrics in timed) / seconds,
            "eta_seconds": (self._steps - last) * (now - self._start) / (last - self._begun),
        }
        if self._flops is not None and self._peak is not None:
            flops = self._flops.at(losses / (len(timed) * math.prod(shape))) * len(timed)
            found["mfu"] = flops / (seconds * self._peak)
        return found

    def resume(self) -> None:
        """Leaves out of the next rates what has passed since the last ones."""
        self._clock = time.monotonic()
