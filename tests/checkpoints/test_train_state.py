"""Checkpoints that are damaged, and disks that are full: reported, and the last good checkpoint used and kept."""

from __future__ import annotations

import os
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from specjax.checkpoints.train_state import Checkpoints, _absolute, run_params


def state(value: float, size: int = 64):
    noise = jnp.asarray(np.random.default_rng(0).normal(size=(size, 8)), jnp.float32)  # not to be compressed
    return {"params": {"layers": {0: noise + value}}, "step": jnp.asarray(int(value), jnp.int32), "average": None}


ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state(0.0))


def saved(directory, steps=(1, 2, 3)):
    """Checkpoints of these steps, the later the worse."""
    checkpoints = Checkpoints(epath.Path(directory), "m")
    for step in steps:
        checkpoints.save(step, state(float(step)), {"m": -float(step)})
    checkpoints.close()


def damage(directory, step):
    """Cuts every data file of a checkpoint in half."""
    files = [p for p in (directory / str(step)).rglob("*") if p.is_file() and p.parent.name == "d"]
    assert files
    for file in files:
        os.truncate(file, file.stat().st_size // 2)


def test_the_two_newest_and_the_best_are_kept(tmp_path):
    saved(tmp_path, (1, 2, 3, 4, 5))
    assert sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()) == [1, 4, 5]


def test_a_checkpoint_says_which_versions_wrote_it(tmp_path):
    saved(tmp_path)
    written = Checkpoints(epath.Path(tmp_path), "m").written_by(3)
    assert written["jax"] == jax.__version__ and {"specjax", "optax", "orbax-checkpoint"} <= written.keys()


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_it_used(tmp_path):
    saved(tmp_path)
    damage(tmp_path, 3)
    checkpoints = Checkpoints(epath.Path(tmp_path), "m")
    with pytest.warns(UserWarning, match="the checkpoint of step 3 .* is damaged .*; going on from step 2"):
        found = checkpoints.restore(ABSTRACT)
    assert int(found["step"]) == 2
    # What was damaged is gone: its step can be saved again.
    checkpoints.save(3, state(3.0), {"m": 1.0})
    checkpoints.close()
    assert run_params(epath.Path(tmp_path), "m")[0] == 3


def test_where_no_checkpoint_can_be_read_nothing_is_removed(tmp_path):
    saved(tmp_path)
    for step in (1, 2, 3):
        damage(tmp_path, step)
    checkpoints = Checkpoints(epath.Path(tmp_path), "m")
    with pytest.warns(UserWarning), pytest.raises(OSError, match="step 1 .* cannot be read, nor can 3, 2"):
        checkpoints.restore(ABSTRACT)
    checkpoints.close()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["1", "2", "3"]


def test_a_full_disk_is_reported_and_the_last_good_checkpoint_kept(tmp_path):
    """No file may grow beyond a limit, which fails writes as a full disk does."""
    saved(tmp_path, (1,))
    checkpoints = Checkpoints(epath.Path(tmp_path), "m")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(OSError, match="could not be written .*the last good one is of step 1, kept"):
            checkpoints.save(2, state(2.0, size=1 << 14), {"m": 9.0})
            checkpoints.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    again = Checkpoints(epath.Path(tmp_path), "m")
    assert int(again.restore(ABSTRACT)["step"]) == 1
    again.close()


def test_a_relative_directory_is_taken_and_a_remote_one_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved("runs/x")
    assert run_params(epath.Path("runs/x"), "m")[0] == 1
    checkpoints = Checkpoints(epath.Path("runs/x"), "m")
    assert int(checkpoints.restore(ABSTRACT)["step"]) == 3
    checkpoints.close()
    assert str(_absolute(epath.Path("gs://bucket/run"))) == "gs://bucket/run"
