"""Small studies and their summaries; here a short program stands in for the benchmarks, tested elsewhere."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from experiments import _main, ablate, small, summarise
from specjax import build
from tests.evaluation.test_report import META, ROWS, row
from tests.experiments.test_report import save

COMMAND = "python -m experiments.benchmark --config=x.py --workdir=/somewhere/else --config.seed=1"


def test_a_summary_has_no_tokens_and_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*ROWS, row("late", tau=1 / 3, divergences=[{"baseline": 17, "other": 23}])]
    folder = Path(save(tmp_path / "runs" / "chen", rows))
    document = json.loads((folder / "results.json").read_text())
    document["meta"] |= {"command": COMMAND, "programs": {"draft": ["run"]}}
    (folder / "results.json").write_text(json.dumps(document))
    summarise.main([str(folder), f"--out={tmp_path}/out"])
    found = json.loads((tmp_path / "out" / "chen.json").read_text())
    assert (
        found["meta"]["command"] == "python -m experiments.benchmark --config=x.py --workdir=runs/chen --config.seed=1"
    )
    assert found["meta"]["schema"] == document["meta"]["schema"] and "programs" not in found["meta"]
    assert len(found["rows"]) == len(rows) and found["rows"][-1]["tau"] == 0.333333
    assert not any("divergences" in r for r in found["rows"])
    assert f"chen.json: {len(rows)} rows" in capsys.readouterr().out


def test_a_summary_says_what_a_reader_has_to_know(tmp_path: Path) -> None:
    folder = Path(save(tmp_path / "runs" / "chen", ROWS))
    summarise.main([str(folder), f"--out={tmp_path}/out"])
    assert "note" not in json.loads((tmp_path / "out" / "chen.json").read_text())["meta"]
    summarise.main([str(folder), f"--out={tmp_path}/out", "--note=a busy machine"])
    assert json.loads((tmp_path / "out" / "chen.json").read_text())["meta"]["note"] == "a busy machine"


def test_a_summary_names_other_runs_by_where_they_would_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(save(tmp_path / "elsewhere" / "gloeckle", ROWS))
    document = json.loads((folder / "results.json").read_text())
    made = f"{tmp_path}/elsewhere/mtp4"
    document["meta"] |= {
        "command": f"{COMMAND} --config.target.source={made}/target",
        "config": {"rows": [{"source": f"{made}/drafter"}], "target": {"source": "smollm2"}},
    }
    (folder / "results.json").write_text(json.dumps(document))
    monkeypatch.chdir(tmp_path)  # A run may be named by a path from here, the others in it stand as they were typed.
    summarise.main(["elsewhere/gloeckle", f"--out={tmp_path}/out"])
    found = json.loads((tmp_path / "out" / "gloeckle.json").read_text())["meta"]
    assert found["command"].endswith("--workdir=runs/gloeckle --config.seed=1 --config.target.source=runs/mtp4/target")
    assert found["config"] == {"rows": [{"source": "runs/mtp4/drafter"}], "target": {"source": "smollm2"}}


def test_ablations_have_a_summary_without_the_measures_of_every_row(tmp_path: Path) -> None:
    folder = Path(save(tmp_path / "ablations", [{"pair": "tvd", "difference": 1 / 3}], ablate.SCHEMA))
    document = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps(document | {"cells": {"kl": {"measures": {}}}}))
    summarise.main([str(folder), f"--out={tmp_path}/out"])
    found = json.loads((tmp_path / "out" / "ablations.json").read_text())
    assert set(found) == {"meta", "rows"} and found["rows"] == [{"pair": "tvd", "difference": 0.333333}]
    save(tmp_path / "other", [], "specjax.plan/1")
    with pytest.raises(ValueError, match="'specjax.plan/1', this version reads 'specjax.benchmark/1' and 'specjax.abl"):
        summarise.main([str(tmp_path / "other"), f"--out={tmp_path}/out"])


def test_a_run_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no runs were named"):
        summarise.main([])
    with pytest.raises(FileNotFoundError, match="no results at"):
        summarise.main([str(tmp_path), f"--out={tmp_path}/out"])
    assert not (tmp_path / "out").exists()


def test_every_small_setting_of_a_paper_is_a_study(capsys: pytest.CaptureFixture[str]) -> None:
    papers = {path.stem for path in (small.ROOT / "configs" / "papers").glob("[!_]*.py") if "_base" in path.read_text()}
    assert papers <= set(small.STUDIES)
    for steps in small.STUDIES.values():
        for step in steps:
            path, _, argument = step.config.partition(":")
            config = build.load_config(path, argument or None)
            for option in step.more:
                _main.check_field(config, option.removeprefix("--config.").partition("=")[0])
    assert small.main(["--list"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "python -m experiments.benchmark --config=configs/papers/chen.py:small --workdir=runs/chen" in printed
    with pytest.raises(ValueError, match="no study 'chenn'; there are leviathan"):
        small.main(["chenn"])


class Program(small.Step):
    """A step that writes what it makes after so many seconds."""

    def command(self, runs: Path) -> list[str]:
        made = repr(str(runs / self.run / "results.json"))
        write = "p.parent.mkdir(exist_ok=True); p.write_text(p.read_text() + 'x' if p.exists() else 'x')"
        return ["-c", f"import pathlib, time; time.sleep({self.config}); p = pathlib.Path({made}); {write}"]


def test_what_is_finished_is_not_run_again_and_time_ends_a_study(tmp_path: Path) -> None:
    steps = (Program("", "0", "first", makes=None), Program("", "0", "second"))
    for _ in range(2):
        assert small.study(steps, tmp_path, math.inf) == 0
    assert [(tmp_path / s.run / "results.json").read_text() for s in steps] == ["x", "x"]
    assert (tmp_path / "first" / "finished").exists() and not (tmp_path / "second" / "finished").exists()
    long = (Program("", "600", "third"),)
    start = time.monotonic()
    assert small.study(long, tmp_path, start + 0.5) == _main.RESTART
    assert small.study(long, tmp_path, start) == _main.RESTART, "none is begun when the time is up"
    assert time.monotonic() - start < 60 and not (tmp_path / "third").exists()


def test_a_study_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "good", ROWS)
    wrong = Program("", "raise_an_error", "wrong")
    monkeypatch.setattr(small, "STUDIES", {"wrong": (wrong,), "good": (Program("", "0", "good"),)})
    assert small.main([f"--runs={tmp_path}", f"--out={tmp_path}/out"]) == 1
    assert "failed: wrong" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "good.json").read_text())["meta"]["created"] == META["created"]
