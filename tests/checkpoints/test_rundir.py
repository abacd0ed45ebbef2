import json

import pytest

from specjax.checkpoints import rundir
from specjax.checkpoints.rundir import RunDirectory


def test_a_run_keeps_its_config_and_refuses_another(tmp_path):
    run = RunDirectory(tmp_path / "a" / "run")
    run.claim({"a": {"b": (1, 2)}, "c": 3.0})
    run.claim({"a": {"b": [1, 2]}, "c": 3.0})
    assert run.config() == {"a": {"b": [1, 2]}, "c": 3.0}
    with pytest.raises(ValueError) as error:
        run.claim({"a": {"b": [1, 3]}, "d": 1})
    for line in ("a.b: run has [1, 2], now [1, 3]", "c: run has 3.0, now '(absent)'", "d: run has '(absent)', now 1"):
        assert line in str(error.value)


def test_free_fields_may_differ(tmp_path):
    RunDirectory(tmp_path).claim({"a": {"b": 1}, "c": 2})
    RunDirectory(tmp_path).claim({"a": {"b": 9}, "c": 2}, free=("a.b",))


def test_a_run_keeps_its_target_and_refuses_another_in_one_error(tmp_path):
    made_for = {"target": "a", "target_config": "12", "tokenizer": "34"}
    run = RunDirectory(tmp_path)
    run.claim({"rate": 1}, made_for=made_for)
    run.claim({"rate": 1}, made_for=made_for)
    assert json.loads((tmp_path / "target.json").read_text()) == made_for
    (run.checkpoints / "4").mkdir(parents=True)
    with pytest.raises(ValueError) as error:
        run.claim({"rate": 2}, made_for={**made_for, "target_config": "56", "tokenizer": "78"})
    assert str(error.value).splitlines()[1:] == [
        "  rate: run has 1, now 2",
        "  target_config: run has '12', now '56'",
        "  tokenizer: run has '34', now '78'",
        "give another --workdir, or, to resume it, what that run was made with: config, target, and the data as it was",
    ]


def test_an_older_run_without_a_record_goes_on_only_without_checkpoints(tmp_path):
    made_for = {"target": "a", "tokenizer": "34"}
    empty, trained = RunDirectory(tmp_path / "empty"), RunDirectory(tmp_path / "trained")
    for run in (empty, trained):
        run.claim({"rate": 1})
        (run.checkpoints / "4.orbax-checkpoint-tmp-1").mkdir(parents=True)  # never finished
    (trained.checkpoints / "4").mkdir()
    empty.claim({"rate": 1}, made_for=made_for)
    assert json.loads((tmp_path / "empty" / "target.json").read_text()) == made_for
    with pytest.raises(ValueError, match="target, tokenizer: run has no record of this in target.json") as error:
        trained.claim({"rate": 1}, made_for=made_for)
    assert not (tmp_path / "trained" / "target.json").exists()
    # It says what to write where; done so, the run goes on.
    text, _, place = str(error.value).partition(", put ")[2].splitlines()[0].partition(" into ")
    assert place == str(tmp_path / "trained" / "target.json")
    (tmp_path / "trained" / "target.json").write_text(text)
    trained.claim({"rate": 1}, made_for=made_for)


def test_an_older_run_whose_record_lacks_the_data_is_told_what_to_add(tmp_path):
    """Without a checkpoint it gets the rest; with one it is refused, and what it has recorded still counts."""
    target, data = {"target": "a", "tokenizer": "34"}, {"rows": 120, "draft_vocab": "56"}
    empty, trained = RunDirectory(tmp_path / "empty"), RunDirectory(tmp_path / "trained")
    for run in (empty, trained):
        run.claim({"rate": 1}, made_for=target)
    (trained.checkpoints / "4").mkdir(parents=True)
    empty.claim({"rate": 1}, made_for=target | data)
    assert empty.made_for() == target | data
    empty.claim({"rate": 1}, made_for=target | data | {"rows": 180})  # nothing has come of it yet
    assert empty.made_for() == target | data | {"rows": 180}
    with pytest.raises(ValueError) as error:
        trained.claim({"rate": 1}, made_for=target | data | {"tokenizer": "78"})
    lines = str(error.value).splitlines()[1:-1]
    assert lines[0] == "  tokenizer: run has '34', now '78'"
    assert lines[1].startswith("  rows, draft_vocab: run has no record of this in target.json")
    assert json.dumps(target | data) in lines[1] or json.dumps(target | data, sort_keys=True) in lines[1]
    assert trained.made_for() == target


def test_a_workdir_that_cannot_be_written_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PermissionError, match="workdir .*file/run cannot be written .*another --workdir"):
        RunDirectory(tmp_path / "file" / "run").claim({})


def test_no_run_is_one_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="is no run directory"):
        RunDirectory(tmp_path).config()


def test_rows_of_a_resumed_run_replace_those_after_its_checkpoint(tmp_path):
    run = RunDirectory(tmp_path)
    first = run.writer(-1)
    for step in (0, 1, 2):
        first.write(step, loss=10.0 - step)
        first.flush()
    first.flush()
    second = run.writer(1)
    second.write(2, loss=2.5)
    second.write(3, loss=2.0)
    second.flush()
    assert [(row["step"], row["loss"]) for row in run.metrics()] == [(0, 10.0), (1, 9.0), (2, 2.5), (3, 2.0)]
    parts = sorted(p.name for p in (tmp_path / "metrics").iterdir())
    assert parts == [f"part-{i:06d}.jsonl" for i in range(4)]


def test_metrics_are_never_appended_or_renamed(tmp_path, monkeypatch):
    """What an object store refuses."""
    from etils import epath

    kept = {}
    real = epath.Path(tmp_path).__class__.write_text

    def write_text(self, text, *args, **options):
        assert str(self) not in kept, f"{self} was written twice"
        kept[str(self)] = text
        return real(self, text, *args, **options)

    monkeypatch.setattr(epath.Path(tmp_path).__class__, "write_text", write_text)
    for name in ("rename", "replace"):
        monkeypatch.setattr(epath.Path(tmp_path).__class__, name, lambda *_: pytest.fail("renamed"))
    monkeypatch.setattr(rundir, "is_remote", lambda path: True)
    run = RunDirectory(tmp_path)
    run.claim({"a": 1})
    writer = run.writer(-1)
    for step in range(3):
        writer.write(step, loss=1.0)
        writer.flush()
    assert len(kept) == 4
    assert [json.loads(t.splitlines()[1])["step"] for p, t in kept.items() if "part" in p] == [0, 1, 2]


def test_on_a_disk_a_part_that_was_not_finished_is_none(tmp_path, monkeypatch):
    from etils import epath

    run = RunDirectory(tmp_path)
    run.claim({"a": 1})
    writer = run.writer(-1)
    writer.write(0, loss=1.0)
    writer.flush()
    writer.write(1, loss=0.5)
    real = epath.Path(tmp_path).__class__.write_text

    def killed(self, text, *args, **options):
        real(self, text[: len(text) // 2], *args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(epath.Path(tmp_path).__class__, "write_text", killed)
        writer.flush()
    assert [row["step"] for row in run.metrics()] == [0]
    again = run.writer(0)
    again.write(1, loss=0.4)
    again.flush()
    assert [row["loss"] for row in run.metrics()] == [1.0, 0.4]


def test_a_setting_that_did_not_exist_yet_is_off_in_an_older_run(tmp_path):
    RunDirectory(tmp_path).claim({"a": 1})
    RunDirectory(tmp_path).claim({"a": 1, "rates": (), "name": ""})
    RunDirectory(tmp_path).claim({"a": 1, "objective": {"beta": 0.5}})  # what was done without it
    with pytest.raises(ValueError, match="objective.beta: run has '\\(absent\\)', now 0.1"):
        RunDirectory(tmp_path).claim({"a": 1, "objective": {"beta": 0.1}})
    with pytest.raises(ValueError, match="rate: run has '\\(absent\\)', now 0.5"):
        RunDirectory(tmp_path).claim({"a": 1, "rate": 0.5})


def test_a_training_run_without_a_checkpoint_makes_room_for_another(tmp_path):
    """Its metrics go with it; a checkpoint, or a tracker's file, keeps the directory."""
    data = {"rows": 12}
    for left in ("nothing", "unfinished", "tracked", "trained"):
        run = RunDirectory(tmp_path / left)
        run.claim({"rate": 1}, made_for=data)
        writer = run.writer(-1)
        writer.write(0, loss=9.0)
        writer.flush()
    (tmp_path / "unfinished" / "checkpoints" / "4.orbax-checkpoint-tmp-1").mkdir(parents=True)
    (tmp_path / "tracked" / "wandb.json").write_text("{}")
    (tmp_path / "trained" / "checkpoints" / "4").mkdir(parents=True)
    for left in ("nothing", "unfinished"):
        run = RunDirectory(tmp_path / left)
        run.claim({"rate": 2}, made_for={"rows": 13})
        assert (run.config(), run.made_for(), run.metrics()) == ({"rate": 2}, {"rows": 13}, [])
    for left in ("tracked", "trained"):
        with pytest.raises(ValueError, match="rate: run has 1, now 2"):
            RunDirectory(tmp_path / left).claim({"rate": 2}, made_for=data)


def test_a_run_whose_directory_was_taken_over_is_told_before_its_first_checkpoint(tmp_path):
    run = RunDirectory(tmp_path)
    run.claim({"rate": 1, "train": {"steps": 5}}, made_for={"rows": 12})
    run.check_own({"rate": 1, "train": {"steps": 9}}, free=("train.steps",))
    RunDirectory(tmp_path).claim({"rate": 2, "train": {"steps": 5}}, made_for={"rows": 12})
    with pytest.raises(ValueError, match="taken over by a run of another config .*\n  rate: run has 2, now 1"):
        run.check_own({"rate": 1, "train": {"steps": 5}})


@pytest.mark.parametrize("name", ["config.json", "target.json"])
@pytest.mark.parametrize(("content", "message"), [(b"{", "is damaged"), (b"\xff", "is damaged"), (b"[]", "holds list")])
def test_a_damaged_record_is_named(tmp_path, name, content, message):
    run = RunDirectory(tmp_path)
    run.claim({"rate": 1}, made_for={"rows": 12})
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} {message}"):
        run.claim({"rate": 1}, made_for={"rows": 12})
