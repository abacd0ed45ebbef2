"""A sweep from its config to the table, with a program that only writes what training would."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess

import pytest

from experiments import sweep

PROGRAM = "tests.experiments.quick_training"


def arguments(tmp_path, *more):
    return ["--config=configs/distill.py", f"--workdir={tmp_path}", f"--program={PROGRAM}", *more]


def started(tmp_path):
    return (tmp_path / "started").read_text().splitlines()


def test_what_failed_or_was_interrupted_is_run_again_and_nothing_else(tmp_path, capsys):
    before = signal.getsignal(signal.SIGTERM)
    shared = "--config.train.steps=6"
    (tmp_path / "fail_1").write_text("2")
    assert sweep.main(arguments(tmp_path, shared)) == 1
    assert len(started(tmp_path)) == 9  # three rates, three seeds; a failure stops none of the others
    assert capsys.readouterr().err.count("failed; the same command tries it again") == 3
    (tmp_path / "started").unlink()
    (tmp_path / "fail_1").write_text("75")
    assert sweep.main(arguments(tmp_path, shared)) == 75
    assert started(tmp_path) == ["learning_rate=0.0005-seed=1"]
    (tmp_path / "fail_1").unlink()
    assert sweep.main(arguments(tmp_path, shared)) == 0
    assert len(started(tmp_path)) == 1 + 3
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert [row["point"] for row in rows] == [{"optimizer.learning_rate": rate} for rate in (2e-3, 1e-3, 5e-4)]
    assert rows[0]["mean"] == pytest.approx(0.21) and rows[0]["sd"] == pytest.approx(0.01)
    assert all(row["runs"] == 3 and row["at_step"] == 3 and not row["unfinished"] for row in rows)
    assert "best: " in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is before
    (tmp_path / "started").unlink()
    assert sweep.main(arguments(tmp_path, shared)) == 0
    assert not (tmp_path / "started").exists()


def test_as_a_list_and_as_an_array_job(tmp_path, capsys):
    assert sweep.main(arguments(tmp_path, "--as=list")) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 9
    assert lines[4][1:4] == ["-m", PROGRAM, "--config=configs/distill.py"]
    assert lines[4][4:] == [
        "--config.optimizer.learning_rate=0.001",
        "--config.train.seed=1",
        f"--workdir={tmp_path}/learning_rate=0.001-seed=1",
    ]
    own = ["--as=slurm", "--at_once=2", "--name=rates", "--gpus=1", "--dry-run", "--config.train.steps=6"]
    assert sweep.main(arguments(tmp_path, *own)) == 0
    text = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "#SBATCH --array=0-8%2" in text.splitlines() and "#SBATCH --job-name=rates" in text.splitlines()
    (run,) = [line for line in text.splitlines() if line.startswith("srun")]
    assert "--run=$SLURM_ARRAY_TASK_ID --require_platform=gpu" in run and "--config.train.steps=6" in run


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--config=configs/hydra.py"], "defines no sweep"),
        (["--config=configs/nowhere.py"], "no config file"),
        (["--run=9"], "the sweep has the runs 0 to 8"),
        (["--as=cloud"], "invalid choice: 'cloud'"),
        (["--config.train.stepz=6"], "did you mean 'train.steps'"),
    ],
)
def test_one_error_before_anything_runs(tmp_path, more, says):
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        sweep.main(arguments(tmp_path, *more))
