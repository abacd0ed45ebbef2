"""Rates, FLOP utilisation and time left; the trace of a window of steps; a run that is not this target's."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from experiments._progress import pace as shown
from specjax.checkpoints.rundir import RunDirectory
from specjax.testing import tiny_target
from specjax.training import pace
from specjax.training.pace import Pace, StepFlops, step_flops
from tests.training.test_trainer import CONFIG, trainer


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def test_products_are_counted_through_scans_calls_and_branches():
    def step(x_bd, kernels_ldd, deep):
        def body(x, kernel):
            return jnp.tanh(x @ kernel), None

        x_bd = jax.lax.scan(body, x_bd, kernels_ldd)[0]
        inner = jax.jit(lambda x: jnp.einsum("bi,bj->bij", x, x))(x_bd)
        return jax.lax.cond(deep, lambda: x_bd @ kernels_ldd[0], lambda: x_bd) + inner.sum(-1)

    b, d, layers = 3, 5, 4
    jaxpr = jax.make_jaxpr(step)(jnp.ones((b, d)), jnp.ones((layers, d, d)), True)
    found = step_flops(jaxpr)
    assert found == StepFlops(layers * 2 * b * d * d + 2 * b * d * d, 2 * b * d * d)
    assert found.at(0.5) == found.fixed + b * d * d


def test_what_cannot_be_counted_is_refused():
    def loop(x, n):
        return jax.lax.while_loop(lambda c: c[1] < n, lambda c: (c[0] @ c[0], c[1] + 1), (x, 0))

    with pytest.raises(ValueError, match="a loop whose length is not known"):
        step_flops(jax.make_jaxpr(loop)(jnp.ones((2, 2)), 3))


def test_an_update_of_a_dense_decoder_is_six_a_parameter_and_token(target):
    """Exactly, and attention; four in the target's head, which gradients pass through."""
    made = trainer(target)
    batch = made.load(made.train, np.arange(3))
    rows, length = batch.tokens.shape
    config = made.objective.student.config
    params = jax.tree.leaves(made.init().params["layers"])
    kernels = sum(x.size for x in params if x.ndim > 1)
    attention = 2 * 2 * rows * length**2 * config.num_heads * config.head_dim * config.num_layers
    flops = made.flops(batch)
    assert flops.fixed == 6 * kernels * rows * length + 3 * attention
    chunks = -(-rows * length // 256)
    assert flops.on_loss == 4 * chunks * 256 * config.hidden_size * config.head_size


def test_rates_leave_out_the_step_that_compiles_and_what_is_saved_between(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    measured = Pace(11, 31, StepFlops(60, 80), peak=1000.0)
    metrics = {"loss_positions": np.int32(10), "input_tokens": np.int32(30)}
    assert measured.figures([(11, metrics)], (2, 20)) == {}
    now[0] += 4.0
    found = measured.figures([(step, metrics) for step in (11, 12, 13)], (2, 20))
    # A quarter of the positions carries loss: 80 operations an update.
    assert found == {
        "rows_per_second": 1.0,
        "loss_positions_per_second": 5.0,
        "input_tokens_per_second": 15.0,
        "eta_seconds": 36.0,
        "mfu": pytest.approx(2 * 80 / 4000),
    }
    now[0] += 6.0  # a checkpoint
    measured.resume()
    now[0] += 2.0
    later = measured.figures([(14, metrics)], (2, 20))
    assert later["rows_per_second"] == 1.0 and later["eta_seconds"] == pytest.approx(17 * 12 / 3)
    unknown = Pace(0, 4, None, None)
    now[0] += 1.0
    assert "mfu" not in unknown.figures([(1, metrics)], (2, 20))
    said = shown({f"train/{key}": value for key, value in found.items()})
    assert said == "15 tokens/s (5 with loss)  MFU 4.0%  ETA 0:00:36"


@pytest.mark.pitfall("DeepSpec#84")
def test_a_run_keeps_rates_and_utilisation_and_traces_its_window(target, tmp_path, monkeypatch):
    made = trainer(target, profile=(2, 2))
    made.run(tmp_path / "cpu", CONFIG, stop=lambda: True)  # One step: the window is not reached.
    assert not (tmp_path / "cpu" / "profile").exists()
    made.run(tmp_path / "cpu", CONFIG)
    rows = [row for row in RunDirectory(tmp_path / "cpu").metrics() if "train/loss" in row]
    assert not any("train/mfu" in row for row in rows)  # The peak of a CPU is not known.
    # Two sessions, whose first steps are not timed.
    assert [row["step"] for row in rows if "train/eta_seconds" in row] == [3, 4]
    assert rows[-1]["train/eta_seconds"] == 0.0
    batch = made.load(made.train, np.arange(3))
    assert rows[-1]["train/input_tokens"] <= batch.tokens.size and 0 < rows[-1]["train/loss_positions"]
    # Both are told: what the loss was divided by, and the positions that there are.
    assert 0 < rows[-1]["train/tokens"] <= rows[-1]["train/loss_positions"]
    assert list((tmp_path / "cpu" / "profile").rglob("*.xplane.pb"))

    kind = jax.local_devices()[0].device_kind
    monkeypatch.setitem(pace.PEAK_FLOPS, kind, 1e15)
    trainer(target).run(tmp_path / "known", CONFIG)
    row = RunDirectory(tmp_path / "known").metrics()[-2]
    flops = made.flops(batch).at(row["train/loss_positions"] / batch.tokens.size)
    assert row["train/mfu"] == pytest.approx(flops * row["train/rows_per_second"] / 3 / 1e15)


def test_a_window_outside_the_run_is_named(target):
    for window in ((3, 3), (0, 1), (1,)):
        with pytest.raises(ValueError, match=r"profile=\(.*within the 4 steps of the run"):
            trainer(target, profile=window)


def test_a_run_of_another_target_or_tokenizer_is_refused_before_anything_compiles(target, tmp_path):
    def start():
        raise AssertionError("it began")

    trainer(target).run(tmp_path, CONFIG, stop=lambda: True)
    backend = tokenizers.Tokenizer.from_str(target.tokenizer.backend.to_str())
    backend.add_tokens(["<one more>"])
    tokenizer = dataclasses.replace(target.tokenizer, backend=backend)
    other = dataclasses.replace(target, tokenizer=tokenizer, config_hash="0" * 16)
    with pytest.raises(ValueError) as error:
        trainer(other).run(tmp_path, CONFIG, init=start)
    lines = str(error.value).splitlines()
    assert [line.split(":")[0] for line in lines[1:-1]] == ["  target_config", "  tokenizer"]
    assert f"run has {target.tokenizer.fingerprint()!r}, now {tokenizer.fingerprint()!r}" in lines[2]
