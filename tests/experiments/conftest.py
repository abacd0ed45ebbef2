from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from specjax.checkpoints import save_target
from specjax.testing import noisy_draft, tiny_target


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target, and a draft for it, that programs load."""
    folder = tmp_path_factory.mktemp("tiny")
    target = tiny_target(layers=1, width=16)
    save_target(target, folder / "target")
    save_target(dataclasses.replace(target, params=noisy_draft(target, 0.1)), folder / "draft")
    return folder


@pytest.fixture
def in_workdir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The run directory that programs called in this process use."""
    from etils import epath

    from experiments import _main

    monkeypatch.setattr(_main, "workdir", lambda: epath.Path(tmp_path / "run"))
    return tmp_path / "run"
