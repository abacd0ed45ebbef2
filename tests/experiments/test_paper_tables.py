"""What notebooks print of a study: where it comes from, and what its rows say of a claim."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import paper_tables
from tests.evaluation.test_report import row

MACHINE = {"processor": "a processor", "cores": 2, "devices": ["cpu"]}
META = {"command": "python -m experiments.benchmark --config=x.py", "machine": MACHINE}


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([1.2, 1.04], "agrees"),
        ([1.2, 1.0], "agrees in part"),
        ([1.2, 0.9], "undecided: some pairs agree, some refute"),
        ([1.02, 0.98], "undecided: within noise"),
        ([0.9, 1.0], "refutes in part, at this scale"),
        ([0.9, 0.96], "refutes, at this scale"),
        ([], paper_tables.MISSING),
    ],
)
def test_a_verdict_on_ratios(ratios: list[float], said: str) -> None:
    assert paper_tables.verdict(ratios) == said


def test_rows_that_are_compared_have_the_same_length_and_temperature() -> None:
    rows = [
        row("token 4 T=1", tau=2.0, temperature=1.0),
        row("token 8 T=1", tau=3.0, temperature=1.0),
        row("block 4 T=1", tau=2.2, temperature=1.0),
        row("block 8 T=1", tau=3.6, temperature=1.0),
        row("block 8 T=1", tau=9.0, temperature=1.0, category="code"),
        row("token 4 T=0", tau=2.5),
    ]
    assert paper_tables.compare("token", "block")(rows) == ("tau: 2.00 -> 2.20, 3.00 -> 3.60", "agrees")
    assert paper_tables.compare("block", "token")(rows)[1] == "refutes, at this scale"
    assert paper_tables.compare("token", "block", above=1.0)(rows) == ("not run", paper_tables.MISSING)
    assert paper_tables.compare("tok", "block")(rows) == ("not run", paper_tables.MISSING)


def test_values_along_rows() -> None:
    rows = [row(name, tau=tau) for name, tau in (("W1", 1.1), ("W3", 1.2), ("W5", 1.21))]
    assert paper_tables.rising(("W1", "W3"))(rows) == ("tau: W1 1.10, W3 1.20", "agrees")
    assert paper_tables.rising(("W1", "W3", "W5"))(rows)[1] == "agrees in part"
    assert paper_tables.rising(("W1", "W9"))(rows) == ("not run", paper_tables.MISSING)
    assert paper_tables.rising(("W1", "W3"), category="code")(rows) == ("not run", paper_tables.MISSING)


def test_an_ablation_keeps_its_own_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"pair": "tvd", "metric": "m", "value_worse": 0.2, "value_better": 0.3, "verdict": "agrees"}
    rows = [found | {"difference_ci": [0.05, 0.15]}, found | {"pair": "lk", "difference_ci": None}]
    assert paper_tables.paired("tvd")(rows) == ("m: 0.200 -> 0.300 [+0.050, +0.150]", "agrees")
    assert paper_tables.paired("lk")(rows)[0].endswith("[+nan, +nan]")
    assert paper_tables.paired("jsd")(rows) == ("not run", paper_tables.MISSING)
    claims = [("it helps", "much", paper_tables.paired("tvd"))]
    paper_tables.judge(claims, rows)
    paper_tables.judge(claims, None)
    said = capsys.readouterr().out.splitlines()
    assert said[3].strip() == "agrees" and said[6:] == ["    ours:  not run", "    undecided"]


def test_a_study_says_where_it_comes_from_or_what_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paper_tables, "COMMITTED", tmp_path)
    assert paper_tables.study("chen") is None
    assert "no run of chen is committed; python -m experiments.small chen makes" in capsys.readouterr().out
    (tmp_path / "chen.json").write_text(json.dumps({"meta": META | {"note": "busy"}, "rows": [row("draft 1")]}))
    rows = paper_tables.study("chen")
    assert rows is not None and [r["label"] for r in rows] == ["draft 1"]
    assert capsys.readouterr().out == f"{META['command']}\non a processor, 2 cores, cpu; busy\n"


def test_a_study_is_made_again_beside_what_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_tables, "ROOT", tmp_path)
    commands = []

    def run(command: list[str], **where: object) -> None:
        commands.append((command, where))
        (tmp_path / "runs/rerun/results").mkdir(parents=True)
        (tmp_path / "runs/rerun/results/chen.json").write_text(json.dumps({"meta": META, "rows": [row("new")]}))

    monkeypatch.setattr(subprocess, "run", run)
    rows = paper_tables.study("chen", rerun=True)
    assert rows is not None and rows[0]["label"] == "new"
    (command, where) = commands[0]
    assert command[1:] == ["-m", "experiments.small", "chen", "--runs=runs/rerun", "--out=runs/rerun/results"]
    assert where == {"cwd": tmp_path, "check": True}


def test_it_is_light() -> None:
    """Notebooks import it to show what is committed; JAX takes seconds."""
    program = "import sys, experiments.paper_tables; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=paper_tables.ROOT, check=False).returncode == 0
