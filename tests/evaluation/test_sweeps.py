from __future__ import annotations

import pytest

from specjax.checkpoints.rundir import RunDirectory
from specjax.evaluation import sweeps

GRID = {"optimizer.learning_rate": (1e-3, 2e-3), "train.seed": (0, 1)}


def test_a_grid_is_every_combination_and_a_list_is_itself():
    points = sweeps.expand(GRID)
    assert points == [{"optimizer.learning_rate": rate, "train.seed": seed} for rate in (1e-3, 2e-3) for seed in (0, 1)]
    assert sweeps.expand(points) == points
    names = sweeps.run_names(points)
    assert names[0] == "learning_rate=0.001-seed=0" and len(set(names)) == 4
    # Adding values renames nothing: a sweep that grew goes on.
    assert set(names) <= set(sweeps.run_names(sweeps.expand({**GRID, "train.seed": (0, 1, 2)})))


@pytest.mark.parametrize(
    ("sweep", "says"),
    [
        ({}, "the sweep has no points"),
        ([{}], "the sweep has no points"),
        ({"a": ()}, r"sweep field 'a' has \(\); expected a list"),
        ({"a": "xy"}, "sweep field 'a' has 'xy'"),
        ([{"a": 1}, {"a": 1}], "twice"),
    ],
)
def test_what_is_no_sweep_is_named(sweep, says):
    with pytest.raises(ValueError, match=says):
        sweeps.expand(sweep)


def test_names_are_as_short_as_tells_them_apart():
    assert sweeps.short_names(["train.seed", "data.seed", "train.batch"]) == {
        "train.seed": "train.seed",
        "data.seed": "data.seed",
        "train.batch": "batch",
    }
    with pytest.raises(ValueError, match="both be called 'a=x_y'"):
        sweeps.run_names([{"a": "x/y"}, {"a": "x:y"}])


def test_only_what_differs_is_shown_seeds_are_averaged_and_the_best_comes_first():
    def made(rate, seed, value, step=10):
        point = {"optimizer.learning_rate": rate, "train.batch": 4, "train.seed": seed}
        return sweeps.Outcome(f"{rate}-{seed}", point, "greedy/match", value, 8, step, 10, saved=step == 10)

    rows = sweeps.summary(
        [made(1, 0, 0.2), made(1, 1, 0.4), made(2, 0, 0.5), made(2, 1, None, -1), made(3, 0, None, -1)]
    )
    assert [row["point"] for row in rows] == [{"optimizer.learning_rate": rate} for rate in (2, 1, 3)]
    assert [row["mean"] for row in rows] == [0.5, pytest.approx(0.3), None]
    assert [row["sd"] for row in rows] == [None, pytest.approx(0.1 * 2**0.5), None]
    assert [(row["runs"], row["of"]) for row in rows] == [(1, 2), (2, 2), (0, 1)]
    assert rows[0]["unfinished"] == ["2-1"] and rows[1]["best"] == "1-1"
    assert sweeps.table(rows, "greedy/match").row_count == 3


def test_a_run_is_compared_by_its_best_checkpoint(tmp_path):
    run = RunDirectory(tmp_path)
    assert sweeps.outcome("a", {"x": 1}, run, "m", 4).step == -1
    writer = run.writer(-1)
    for step, value in ((0, 0.1), (2, 0.7), (4, 0.7), (6, float("nan"))):
        writer.write(step, m=value)
    writer.flush()
    found = sweeps.outcome("a", {"x": 1}, run, "m", 8)
    assert (found.value, found.at_step, found.step, found.finished) == (0.7, 2, 6, False)


@pytest.mark.parametrize("exported", ["drafter", "target"])
def test_a_run_is_finished_when_its_last_checkpoint_and_what_is_made_of_it_are_there(tmp_path, exported):
    """Each of these is where a run may have been killed."""
    run = RunDirectory(tmp_path)
    writer = run.writer(-1)
    writer.write(4, m=0.5)
    writer.flush()

    def finished():
        return sweeps.outcome("a", {"x": 1}, run, "m", 4).finished

    (run.checkpoints / "2").mkdir(parents=True)
    (run.checkpoints / "4.orbax-checkpoint-tmp-1").mkdir()
    (tmp_path / exported).mkdir()
    (tmp_path / exported / "config.json").write_text("{}")  # of an earlier interruption
    assert not finished()
    (run.checkpoints / "4").mkdir()
    assert finished()
    (tmp_path / exported / "config.json").unlink()
    assert not finished()
