"""The check of a device, on this one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments import check_device
from experiments.check_device import Row
from specjax import build


@pytest.mark.slow
def test_this_device_is_as_it_should_be(in_workdir: Path) -> None:
    check_device.main(build.load_config("configs/check_device.py", "tiny"))
    rows = json.loads((in_workdir / "results.json").read_text())["rows"]
    assert len(rows) == 10 and sum(row["ok"] is True for row in rows) == 5
    found = {row["check"]: row["found"] for row in rows}
    assert " 0 draft tokens accepted" not in found["greedy texts of prompt lookup"]


def test_what_does_not_hold_is_an_error(in_workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def checks(config: object, target: object) -> Iterator[Row]:
        yield Row("a time", "1 ms")
        yield Row("a law", "p = 0", False)

    monkeypatch.setattr(check_device, "CHECKS", (checks,))
    with pytest.raises(ValueError, match="1 of 2 checks do not hold: a law: p = 0"):
        check_device.main(build.load_config("configs/check_device.py", "tiny"))
    assert len(json.loads((in_workdir / "results.json").read_text())["rows"]) == 2


def test_a_model_that_is_not_known() -> None:
    with pytest.raises(ValueError, match="llama4"):
        check_device.random_target(build.load_config("configs/check_device.py", "llama4"))
