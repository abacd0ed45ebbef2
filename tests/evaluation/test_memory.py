"""Bytes of a device from shapes, against figures worked out by hand and what XLA counts."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from specjax.evaluation.memory import (
    abstract_mesh,
    bytes_per_device,
    decoding_temporaries,
    gathered,
    training_temporaries,
)
from specjax.models import graph, init_cache
from specjax.models.published import published_config
from specjax.parallel import axis_sizes, param_shardings, state_shardings
from specjax.parallel.slices import SLICES, chip, chips_of

LLAMA = published_config("llama3_8b")


def test_weights_of_a_known_model_and_their_shares():
    params = graph(LLAMA)[1]
    whole = bytes_per_device(params, param_shardings(params, abstract_mesh(), "tp", head_dim=128))
    assert whole == 2 * 8_030_261_248  # the model's parameters, in bfloat16
    norms = 2 * (2 * 32 + 1) * 4096
    for sizes, preset in (({"fsdp": 8}, "fsdp"), ({"tensor": 8}, "tp")):
        held = bytes_per_device(params, param_shardings(params, abstract_mesh(**sizes), preset, head_dim=128))
        assert held == (whole - norms) // 8 + norms


def test_a_cache_is_two_heads_wide_entries_a_slot():
    cache = jax.eval_shape(lambda: init_cache(LLAMA, 8, 4096))
    held = bytes_per_device(cache, state_shardings(cache, abstract_mesh(data=2, tensor=8), "tp"))
    assert held == 4 * 4096 * 2 * 1 * 128 * 2 * 32 + 4 * 4  # 4 rows and 1 head a chip; the rows' lengths


def test_temporaries_grow_with_what_they_come_from_and_shrink_with_the_mesh():
    one, eight = axis_sizes(abstract_mesh()), axis_sizes(abstract_mesh(tensor=8))
    few = decoding_temporaries(LLAMA, one, rows=8, width=9, slots=4096)
    many = decoding_temporaries(LLAMA, one, rows=8, width=61, slots=4096)
    assert many == pytest.approx(few * 61 / 9, rel=1e-6)
    assert few / 8 <= decoding_temporaries(LLAMA, eight, rows=8, width=9, slots=4096) < few / 4
    layer = dataclasses.replace(LLAMA.with_layers((0,)), head_size=32000)
    options = {"rows": 256, "length": 2048, "taps": 3, "gradients": 0}
    spread = axis_sizes(abstract_mesh(fsdp=256))
    seven, three = (training_temporaries(LLAMA, layer, spread, steps=k, **options) for k in (7, 3))
    # Kept for the backward pass, a step: attention weights of a row in float32 and rounded.
    assert seven - three > 4 * 6 * 32 * 2048**2
    kept = [
        training_temporaries(LLAMA, layer, spread, steps=7, remat=remat, **options)
        for remat in ("full", "dots_no_batch", "dots", "none")
    ]
    assert kept == sorted(set(kept)) and kept[-1] == seven
    assert gathered(LLAMA, one) == 0 and gathered(LLAMA, spread) == 2 * 128256 * 4096


def test_slices_are_by_size():
    for kind, slices in SLICES.items():
        sizes = [chips_of(topology) for topology in slices]
        assert sizes == sorted(set(sizes)) and all(chip(t) == chip(f"{kind}:1x1") for t in slices)


def test_the_smallest_slice_that_fits_is_picked(monkeypatch):
    from specjax.evaluation.memory import Footprint

    plan_memory = pytest.importorskip("experiments.plan_memory")

    def planned(chips):
        if chips > 64:
            raise ValueError("64 rows are not divisible by 128 chips")
        none = dict(drafter=0, optimizer=0, cache=0, temporaries=1)
        return [
            ("whole", Footprint(weights=100 << 30, **none)),
            ("split", Footprint(weights=(100 << 30) // chips, **none)),
        ]

    rows = plan_memory.fitting("v5e", planned)
    assert [row["slice"] for row in rows if row["smallest"]] == ["v5e:2x4"]
    assert {row["mesh"] for row in rows} == {"split"}  # the preferred layout never fits
    assert [row["fits"] for row in rows] == [False, False, True, True, True, True]
    with pytest.raises(ValueError, match="no v5p slice takes this program: 64 rows"):
        plan_memory.fitting("v5p", lambda chips: planned(128))


def test_bytes_per_device_is_what_an_array_takes():
    tree = {"q": {"kernel": np.zeros((64, 32), np.float32)}, "norm": {"weight": np.zeros(64, np.int8)}}
    mesh = abstract_mesh(fsdp=2, tensor=4)
    assert bytes_per_device(tree, param_shardings(tree, mesh, "fsdp_tp", head_dim=8)) == 64 * 32 * 4 // 8 + 64
