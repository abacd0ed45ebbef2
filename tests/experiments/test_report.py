"""The program on finished runs; the library's own parts are tested in tests/evaluation."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from etils import epath

from experiments import report
from specjax.evaluation.results import SCHEMA
from tests.evaluation.test_report import META, ROWS, row
from tests.experiments.programs import run_all


def save(folder: Path, rows: list[dict], schema: str = SCHEMA) -> str:
    folder.mkdir(parents=True)
    meta = META | {"schema": schema, "definitions": {"tau": "tokens"}, "config": {"target": {"source": "tiny"}}}
    (folder / "results.json").write_text(json.dumps({"meta": meta, "rows": rows}))
    return str(folder)


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    first = save(tmp_path / "one" / "run", ROWS)
    return [first, save(tmp_path / "two" / "run", [*ROWS, row("late", category="code")])]


def test_runs_become_a_page_and_are_printed(runs, tmp_path: Path, capsys) -> None:
    report.main([*runs, f"--out={tmp_path}/page.html"])
    page = (tmp_path / "page.html").read_text()
    assert "one/run: draft" in page and "two/run: draft" in page, "named by as much of the path as tells them apart"
    out = capsys.readouterr().out
    assert "one/run" in out and "two/run" in out and out.count("all 8 prompts, batch 1") == 2
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["page.html"]


def test_a_table_alone_is_printed_or_written(runs, tmp_path: Path, capsys) -> None:
    report.main([runs[0] + "/results.json", runs[1], "--table=methods_by_dataset", "--format=csv"])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [r["row"] for r in rows] == ["draft (one/run)", "draft (two/run)", "late"]
    report.main([*runs, "--table=methods_by_dataset", "--format=latex", f"--out={tmp_path}/t.tex"])
    assert (tmp_path / "t.tex").read_text().startswith(r"\begin{table}") and capsys.readouterr().out == ""
    report.main([*runs, "--table=methods_by_dataset"])
    assert "tiny, T = 0, batch 1" in capsys.readouterr().out


def test_certificates_stand_beside_their_rows(runs, tmp_path: Path, capsys) -> None:
    file = tmp_path / "certificates.json"
    good = {"drafter": "draft_model", "rule": "greedy", "verdict": "pass", "planted": None}
    file.write_text(json.dumps({"rows": [good, good, good | {"planted": "bonus", "verdict": "caught"}]}))
    report.main([runs[0], f"--certificates={file}", f"--out={tmp_path}/page.html"])
    assert "pass, 2 of 2" in (tmp_path / "page.html").read_text() and "pass, 2 of 2" in capsys.readouterr().out
    file.write_text(json.dumps({"rows": [good, good | {"verdict": "fail"}]}))
    (run,) = report.certified(report.read_runs(runs[:1]), epath.Path(file))
    assert {row["label"]: row["certificate"] for row in run.rows}["draft"] == "fail, 1 of 2"
    assert {row["label"]: row["certificate"] for row in run.rows}["plain"] is None
    with pytest.raises(ValueError, match="holds no certificates"):
        report.certified([run], epath.Path(runs[0]) / "results.json")


def test_a_convention_is_printed(tmp_path: Path, capsys) -> None:
    run = save(tmp_path / "counted", [ROWS[0], row("draft", accepted_histogram=[1, 0, 2, 1])])
    report.main([run, "--convention=eagle"])
    assert "as eagle counts" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--convention prints to the terminal alone"):
        report.main([run, "--convention=eagle", "--format=csv"])


def test_what_is_no_benchmark_s_run_is_named_and_left_out(runs, tmp_path: Path, capsys) -> None:
    other = save(tmp_path / "other", ROWS, schema="specjax.benchmark/0")
    (tmp_path / "trained").mkdir()
    found = report.read_runs([f"{tmp_path}/trained", *runs, other])
    assert [run.name for run in found] == ["one/run", "two/run"]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "trained" in said[0] and "has schema 'specjax.benchmark/0'" in said[1]
    with pytest.raises(FileNotFoundError, match="no results at .*trained"):
        report.read_runs([f"{tmp_path}/trained", other])


def test_one_line_for_what_is_wrong(runs, tmp_path: Path) -> None:
    folder = tmp_path / "outcomes"
    folder.mkdir()
    (tmp_path / "empty").mkdir()
    other = save(tmp_path / "other", ROWS, schema="specjax.benchmark/0")
    cases = {
        f"{other}": f"results.json has schema 'specjax.benchmark/0', this version reads '{SCHEMA}'",
        f"{tmp_path}/empty": "no results at",
        "": "no runs were named; expected run directories",
        f"{runs[0]} {runs[0]}": "is named twice",
        f"{runs[0]} --table=methods": "invalid choice: 'methods'",
        f"{runs[0]} --format=latex": "--format=latex is of a table: add --table=methods_by_dataset",
        f"{runs[0]} --table=methods_by_dataset --out=x": "--out needs a --format that is a file's",
        f"{runs[0]} --tabel=x": "unrecognized arguments: --tabel=x",
    }
    outcomes = run_all("experiments.report", [case.split() for case in cases], folder)
    for outcome, says in zip(outcomes, cases.values(), strict=True):
        assert outcome.code == 2 and outcome.out == ""
        assert outcome.err.startswith("error: ") and outcome.err.count("\n") == 1 and says in outcome.err
