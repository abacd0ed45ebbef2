from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
from etils import epath

from specjax.evaluation import results


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    file = epath.Path(tmp_path / "results.json")
    results.write_json(file, {"rows": [1]})
    with pytest.raises(ValueError, match="Out of range float"):
        results.write_json(file, {"rows": [float("nan")]})
    assert json.loads(file.read_text()) == {"rows": [1]}
    results.write_json(file, {"rows": [2]})
    assert json.loads(file.read_text()) == {"rows": [2]}
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"], "no scratch file is left"


def test_a_workdir_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PermissionError, match="the workdir .*file/run cannot be written .*give another --workdir"):
        results.check_writable(epath.Path(tmp_path / "file" / "run"))
    results.check_writable(epath.Path(tmp_path / "new" / "run"))
    assert list((tmp_path / "new" / "run").iterdir()) == []


def test_results_are_read_back_and_others_refused(tmp_path: Path) -> None:
    file = epath.Path(tmp_path / "results.json")
    with pytest.raises(FileNotFoundError, match="no results at"):
        results.read_results(file)
    file.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        results.read_results(file)
    file.write_text(json.dumps({"meta": {"schema": "specjax.benchmark/0"}, "rows": []}))
    with pytest.raises(ValueError, match="has schema 'specjax.benchmark/0', this version reads 'specjax.benchmark/1'"):
        results.read_results(file)
    results.write_json(file, {"meta": results.describe({"seed": 1}, {"dtype": "float32"}), "rows": []})
    assert results.read_results(file)["meta"]["config"] == {"seed": 1}


def test_meta_says_where_numbers_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    main = types.SimpleNamespace(__spec__=types.SimpleNamespace(name="experiments.benchmark"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--config=configs/quickstart.py", "--config.only=('a b',)"])
    meta = results.describe({}, {})
    assert {"schema", "versions", "machine", "config", "commit", "precision"} <= set(meta)
    assert {"python", "jax", "flax", "specjax"} <= set(meta["versions"])
    assert meta["machine"]["cores"] >= 1 and meta["machine"]["backend"] == "cpu"
    assert meta["peak_memory_bytes"] > 2**20
    assert meta["command"] == (
        "python -m experiments.benchmark --config=configs/quickstart.py '--config.only=('\"'\"'a b'\"'\"',)'"
    )
    json.dumps(meta, allow_nan=False)


def test_rows_are_selected_by_value() -> None:
    rows = [{"a": 1, "b": 2}, {"a": 1, "b": 3}]
    assert results.select(rows, a=1, b=3) == [rows[1]]
    assert results.select(rows, c=1) == []
