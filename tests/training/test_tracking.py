"""Weights & Biases offline, and TensorBoard, for real: each step once however the run was interrupted."""

from __future__ import annotations

import contextlib
import struct
import sys
import time

import pytest

from specjax.checkpoints.rundir import RunDirectory
from specjax.training.tracking import tensorboard_sink, wandb_sink

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

    def read():
        return [Record.FromString(data) for data in records(path.read_bytes())]

    # Another process writes it, and on a busy machine is not done when `finish` returns.
    deadline = time.monotonic() + 30
    while not any(record.WhichOneof("record_type") == "exit" for record in read()) and time.monotonic() < deadline:
        time.sleep(0.1)
    found = []
    for record in read():
        if record.WhichOneof("record_type") == "history":
            items = {(item.key or "/".join(item.nested_key)): item.value_json for item in record.history.item}
            found.append((int(items["_step"]), items))
    return found


def test_a_resumed_run_goes_on_under_its_id_and_sends_no_step_twice(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
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


def crc32c(data):
    """Castagnoli's, bit by bit, masked as event files have it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def scalars(folder):
    """Step, name and value of everything in a directory's event files, in TensorBoard's order; checks the framing."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.iterdir()):
        assert "tfevents" in path.name
        content, at, events = path.read_bytes(), 0, []
        while at < len(content):
            size, check = struct.unpack_from("<QI", content, at)
            data = content[at + 12 : at + 12 + size]
            assert check == crc32c(content[at : at + 8])
            assert struct.unpack_from("<I", content, at + 12 + size) == (crc32c(data),)
            events.append(Event.FromString(data))
            at += 16 + size
        assert events[0].file_version == "brain.Event:2"
        found += [(e.step, value.tag, value.simple_value) for e in events[1:] for value in e.summary.value]
    return found


def test_event_files_have_each_step_once(tmp_path):
    pytest.importorskip("tensorboardX")
    run = RunDirectory(tmp_path)
    writer = run.writer(-1, tensorboard_sink(run.path, wanted=True))
    for step in (1, 2):
        writer.write(step, **{"train/loss": 1.0 / step})
    writer.write(2, **{"held/match": 0.5, "train/skipped_rows": [7, 8]})
    writer.flush()
    lost = run.writer(2)  # No sink sees it: the run was killed in between.
    lost.write(3, **{"train/loss": 0.25})
    lost.flush()
    writer = run.writer(2, tensorboard_sink(run.path, wanted=True))
    for step in (3, 4):
        writer.write(step, **{"train/loss": 1.0 / step})
    writer.flush()
    assert scalars(tmp_path / "tensorboard") == [
        (1, "train/loss", 1.0), (2, "train/loss", 0.5), (2, "held/match", 0.5), (3, "train/loss", 0.25),
        (4, "train/loss", 0.25),
    ]  # fmt: skip
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3  # One a write, each whole; nothing is appended.


def test_without_tensorboard_there_is_no_sink_and_a_missing_package_is_named(tmp_path, monkeypatch):
    assert tensorboard_sink(tmp_path, wanted=False) == ()
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"--tensorboard needs tensorboardX: pip install 'specjax\[tensorboard\]'"):
        tensorboard_sink(tmp_path, wanted=True)


class Down:
    """A service that is away for a while."""

    def __init__(self, failures):
        self.failures, self.got = failures, []

    def write(self, rows):
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no route")
        self.got += [row["step"] for row in rows]


def test_a_sink_that_fails_ends_nothing_and_gets_what_it_missed(tmp_path):
    run, down, well = RunDirectory(tmp_path), Down(failures=2), Down(failures=0)
    writer = run.writer(-1, (down, well))
    for step in (1, 2, 3):
        writer.write(step, **{"train/loss": 1.0})
        with (
            pytest.warns(UserWarning, match=rf"Down took no metrics up to step {step} .*no route")
            if step < 3
            else (contextlib.nullcontext())
        ):
            writer.flush()
    assert down.got == well.got == [row["step"] for row in run.metrics()] == [1, 2, 3]
