"""Weights & Biases offline, for real: what `wandb sync` would take, each step once however the run was interrupted."""

from __future__ import annotations

import struct

import pytest

from specjax.checkpoints.rundir import RunDirectory
from specjax.training.tracking import wandb_sink

wandb = pytest.importorskip("wandb")


BLOCK, HEADER = 1 << 15, 7


def records(content: bytes):
    """The records of an offline run's file: LevelDB's log format behind a header of seven bytes."""
    assert content[:4] == b":W&B"
    at, begun = HEADER, b""
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        begun += content[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (1, 4):  # whole, or the last part
            yield begun
            begun = b""


def history(path):
    """Steps and values that an offline run's file holds."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for data in records(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {(item.key or "/".join(item.nested_key)): item.value_json for item in record.history.item}
            found.append((int(items["_step"]), items))
    return found


def test_a_resumed_run_goes_on_under_its_id_and_sends_no_step_twice(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    config, options = {"train": {"steps": 6}}, {"mode": "offline", "project": "specjax"}
    run = RunDirectory(tmp_path / "run")
    with wandb_sink(run.path, config, **options) as sinks:
        writer = run.writer(-1, sinks)
        for step in (1, 2):
            writer.write(step, **{"train/loss": 1.0 / step})
        writer.write(2, **{"held/match": 0.5})
        writer.flush()
    # A part that no sink saw: the run was killed in between.
    lost = run.writer(2)
    lost.write(3, **{"train/loss": 0.25})
    lost.flush()
    with wandb_sink(run.path, config, **options) as sinks:
        writer = run.writer(2, sinks)
        for step in (3, 4):
            writer.write(step, **{"train/loss": 1.0 / step})
        writer.flush()
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({file.stem for file in files}) == 1  # two sessions of one id
    rows = [row for file in files for row in history(file)]
    assert [step for step, _ in rows] == [1, 2, 3, 4]
    assert rows[1][1]["train/loss"] == "0.5" and rows[1][1]["held/match"] == "0.5"


def test_disabled_is_no_sink_and_an_unknown_mode_is_named(tmp_path):
    with wandb_sink(tmp_path, {}, mode="disabled", project="x") as sinks:
        assert sinks == ()
    with pytest.raises(ValueError, match="wandb mode 'sometimes' is unknown; expected disabled, offline, online"):
        with wandb_sink(tmp_path, {}, mode="sometimes", project="x"):
            pass
