"""The command line of every program: expected errors are one line and exit code 2, before anything is compiled."""

from __future__ import annotations

from pathlib import Path

import ml_collections
import pytest

from experiments import _main
from specjax.training.data import read_answers
from tests.experiments.programs import run_all


def config() -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict({"max_new_tokens": 1, "rows": {"draft": {"source": ""}}})


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("max_new_token", "unknown config field 'max_new_token'; did you mean 'max_new_tokens'? fields: "),
        ("rows.darft.source", "did you mean 'rows.draft'? fields of 'rows': draft"),
        ("rows.draft.path", "unknown config field 'rows.draft.path'; fields of 'rows.draft': source"),
        ("max_new_tokens.x", "unknown config field 'max_new_tokens.x'"),
    ],
)
def test_a_field_that_does_not_exist(field: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        _main.check_field(config(), field)
    assert says in str(caught.value)


def test_fields_that_exist() -> None:
    for field in ("max_new_tokens", "rows", "rows.draft.source"):
        _main.check_field(config(), field)


def test_expected_errors_are_one_line_and_others_are_not_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, _main.one_line_errors():
        raise ValueError("two\nlines")
    assert ended.value.code == 2 and capsys.readouterr().err == "error: two lines\n"
    with pytest.raises(KeyError), _main.one_line_errors():
        raise KeyError("a fault of ours")


def test_a_text_that_is_missing_where_no_directory_was_named_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hint = "SPECJAX_DATA is not set: set it to the directory of the texts"

    def said(path: object) -> str:
        with pytest.raises(SystemExit), _main.one_line_errors():
            read_answers(path)
        return capsys.readouterr().err

    monkeypatch.delenv("SPECJAX_DATA", raising=False)
    assert hint in said(_main.data_dir() / "target_text" / "nowhere.jsonl")
    assert hint not in said("/nowhere.jsonl")  # a file that the user named
    monkeypatch.setenv("SPECJAX_DATA", _main.DATA)
    assert hint not in said(_main.data_dir() / "target_text" / "nowhere.jsonl")


def test_of_a_config_file_that_raised_only_the_message_is_kept() -> None:
    text = "flag --config=x.py:y: Error\n\nTraceback (most recent call last):\n  File ...\n"
    text += "ValueError: unknown argument 'y'\n"
    assert _main.one_line(ValueError(text)) == "unknown argument 'y'"


def test_benchmark_refuses(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECJAX_DATA", raising=False)
    model = f"--config.target.source={tiny}/target"
    plain = "--config.only=autoregressive"
    run = f"--workdir={tmp_path}/run"
    (tmp_path / "file").write_text("")
    (tmp_path / "broken.py").write_text("def get_config(:")
    (tmp_path / "raises.py").write_text("def get_config():\n    raise RuntimeError('boom')\n")
    (tmp_path / "lacks.py").write_text("import no_such\n\ndef get_config():\n    pass\n")
    (tmp_path / "nothing.py").write_text("def get_config(arg=None):\n    return None\n")
    (tmp_path / "empty.jsonl").write_text('{"id": "a", "category": "b", "turns": [""]}\n')
    long = tmp_path / "long.jsonl"
    long.write_text('{"id": "a", "category": "b", "turns": ["%s"]}\n' % ("word " * 2000))
    cases = [
        ([run, "--config.max_new_token=3"], "unknown config field 'max_new_token'; did you mean 'max_new_tokens'?"),
        (
            [run, "--config=configs/quickstart.py:fll"],
            "unknown argument 'fll' of configs/quickstart.py; known: full, sampled, quick",
        ),
        ([run, "--config=configs/quikstart.py"], "no config file configs/quikstart.py"),
        ([run, "--config.max_new_tokens=many"], "invalid literal for int"),
        ([run, "--config.max_new_tokens=0"], "max_new_tokens=0; expected at least 1"),
        ([run, "--config.temperatures=-1.0"], "temperature=-1.0"),
        ([run, "--config.prompts=shiped"], "no prompts named 'shiped'"),
        ([run, f"--config.prompts={tmp_path}/empty.jsonl"], "every turn must be a non-empty string"),
        ([run, "--config.prompts=spec_bench:$SPECJAX_DATA/q.jsonl"], "SPECJAX_DATA"),
        ([f"--workdir={tmp_path}/file/run"], "cannot be written"),
        ([run, "--config.target.source=smollm"], "no such model: 'smollm'; did you mean 'smollm2'?"),
        ([run, model, plain, f"--config.prompts={long}"], "prompt 'a' has 10"),
        ([run, model, "--config.only=drft"], "only names 'drft'"),
        (
            [run, model, "--config.only=autoregressive,draft"],
            "hydra, prompt_lookup; several are written \"('autoregressive', 'draft')\"",
        ),
        ([run, "--require_platform=gpu"], "requires the platform 'gpu', but JAX runs on 'cpu'"),
        ([run, "--config=README.md"], "README.md is no Python file"),
        ([run, f"--config={tmp_path}/raises.py"], "raises.py raised RuntimeError in line 2: boom"),
        ([run, f"--config={tmp_path}/lacks.py"], "lacks.py cannot import what it needs: No module named 'no_such'"),
        ([run, f"--config={tmp_path}/raises.py:x"], "raises.py takes no argument, and was given 'x'"),
        ([run, model], "smollm2-135m-distilled"),  # a draft for another target
        ([run, model, f"--config.rows.draft.source={tmp_path}/nowhere"], "no such model"),
        ([run, model, plain, "--config.layout=blocked"], "layout='blocked'"),
        ([run, "stray"], "unexpected argument 'stray'"),
        (["--workdir="], "--workdir is empty"),
        ([run, "--config=configs/generate.py"], "is it a config of this program?"),
        ([run, f"--config={tmp_path}/broken.py"], "broken.py is no valid Python"),
        ([run, f"--config={tmp_path}/nothing.py"], "returns NoneType; expected an ml_collections.ConfigDict"),
        (
            [
                run,
                model,
                plain,
                "--config.rows.prompt_lookup.num_nodes=500",
                "--config.only=('autoregressive', 'prompt_lookup')",
            ],
            "num_nodes=500 of drafter 'prompt_lookup'; expected at most 128",
        ),
    ]
    outcomes = run_all("experiments.benchmark", [arguments for arguments, _ in cases], tmp_path)
    for (arguments, says), outcome in zip(cases, outcomes, strict=True):
        assert outcome.code == 2, (arguments, outcome)
        lines = outcome.err.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: ") and says in lines[0], (arguments, outcome.err)
    assert not (tmp_path / "run" / "results.json").exists()


def test_generate_refuses(tiny: Path, tmp_path: Path) -> None:
    model = f"--config.target.source={tiny}/target"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"objective": {}, "train": {}}')
    cases = [
        (["--prompt="], "the prompt is empty"),
        (["--prompt=a\udcff"], "--prompt is no valid text: character 1 is '\\udcff'"),
        (["--prompt=x", f"--config=configs/generate.py:{tmp_path}/run", model], "holds no finished drafter"),
        ([], "the prompt is empty"),  # nothing on standard input
        (["--prompt=x", "--config.max_new_tokens=-2"], "max_new_tokens=-2; expected at least 1"),
        (["--prompt=x", "--config.temperature=-1"], "temperature=-1.0"),
        (["--prompt=x", "--config.tempreature=1"], "did you mean 'temperature'?"),
        (["--prompt=x", "--config=configs/generate.py:lokup"], "did you mean 'lookup'?"),
        (["--prompt=x", "--config=configs/generate.py:plain", "--config.logit_bias=(5, 1.0)"], "expected pairs"),
        (["--prompt=x", f"--config=configs/generate.py:{tmp_path}/nowhere", model], "no such model"),
        ([f"--prompt={'word ' * 1000}", "--config=configs/generate.py:plain", model], "the model's context is 4096"),
    ]
    outcomes = run_all("experiments.generate", [arguments for arguments, _ in cases], tmp_path)
    for (arguments, says), outcome in zip(cases, outcomes, strict=True):
        assert (outcome.code, outcome.out) == (2, ""), (arguments, outcome)
        lines = outcome.err.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: ") and says in lines[0], (arguments, outcome.err)
