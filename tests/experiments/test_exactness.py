from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from experiments import exactness
from specjax import api, build
from specjax.testing.faults import planted

FAULT = "argmax child with a soft q"


def quick(**more):
    options = {"draws": 1 << 14, "tv": 0.06, "only": ("greedy", "prompt_lookup", FAULT)} | more
    return build.load_config("configs/exactness.py", "quick", options)


def test_certificates_are_written_and_printed(in_workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exactness.main(quick())
    document = json.loads((in_workdir / "certificates.json").read_text())
    assert document["meta"]["schema"] == "specjax.certificates/1" and document["meta"]["config"]["tv"] == 0.06
    rows = {(row["drafter"], row["rule"], row.get("planted")): row for row in document["rows"]}
    assert set(rows) == {
        ("prompt_lookup", "one_hot", None),
        ("draft_model", "greedy", None),
        ("table_tree", "greedy", None),
        ("table_tree", "recursive", FAULT),
    }
    assert rows["prompt_lookup", "one_hot", None]["verdict"] == "pass"
    assert rows["prompt_lookup", "one_hot", None]["power"] >= 0.99
    assert rows["draft_model", "greedy", None]["p_value"] is None
    assert rows["table_tree", "recursive", FAULT]["verdict"] == "caught"
    said = capsys.readouterr().out
    assert "4 certificates in" in said and "caught" in said


def test_a_fault_that_is_missed_is_an_error(in_workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = planted()[FAULT]
    sound = dataclasses.replace(sound, drafter=sound.sound_drafter)
    monkeypatch.setattr(exactness, "planted", lambda: {FAULT: sound})
    with pytest.raises(ValueError, match=f"1 rows are not as they should be: table_tree with recursive .{FAULT}"):
        exactness.main(quick(only=(FAULT,)))
    assert json.loads((in_workdir / "certificates.json").read_text())["rows"][0]["verdict"] == "missed"


@pytest.mark.slow
def test_a_model_of_ones_own(tiny: Path, in_workdir: Path) -> None:
    options = {"greedy_prompts": 2, "contexts": 1, "max_new_tokens": 8, "rows": 1024, "temperature": 0.4}
    exactness.main(build.load_config("configs/exactness.py", f"{tiny}/target", options))
    rows = json.loads((in_workdir / "certificates.json").read_text())["rows"]
    assert [(r["drafter"], r["check"], r["verdict"]) for r in rows] == [
        ("prompt_lookup", "greedy text", "pass"),
        ("prompt_lookup", "next tokens", "pass"),
    ]


def test_a_drafter_and_a_rule_from_the_command_line(tiny: Path) -> None:
    options = ["drafter.name=draft_model", f"drafter.source={tiny}/draft", "drafter.num_nodes=2"]
    options += ["rule=threshold", "rule_options=(('bar', 0.5),)", "repetition_penalty=1.1", "layout=plain"]
    config = build.load_config("configs/exactness.py", f"{tiny}/target", options)
    ((name, case),) = exactness.real_cases(config, Console())
    target, drafting, rule = case.args
    assert (name, drafting.name, drafting.drafter.num_nodes, rule) == ("draft_model", "draft_model", 2, "threshold")
    asked = case.keywords
    assert (asked["rule_options"], asked["layout"], asked["rows"]) == ({"bar": 0.5}, "plain", 0)
    inspect.signature(api.certify).bind(target, drafting, rule, **asked)
    assert asked["repetition_penalty"] == 1.1
    config = build.load_config("configs/exactness.py", f"{tiny}/target", ["rule_options=(1,)"])
    with pytest.raises(ValueError, match="expected pairs"):
        next(exactness.real_cases(config, Console()))


def test_what_is_asked_for_must_exist(in_workdir: Path) -> None:
    with pytest.raises(ValueError, match="unknown 'fault'; known: drafters, rules, faults"):
        exactness.main(quick(parts=("fault",)))
    with pytest.raises(ValueError, match="only names 'blok'; did you mean 'block'"):
        exactness.main(quick(only=("blok",)))
    for wrong in ({"tv": 0.0}, {"draws": 0}):
        with pytest.raises(ValueError, match="expected tv in .0, 1. and draws >= 1"):
            exactness.main(quick(**wrong))
    with pytest.raises(ValueError, match="leave nothing to certify"):
        exactness.main(quick(only=("greedy",), shard="8/9"))
    for shard in ("2/2", "1", "-1/2", "a/b"):
        with pytest.raises(ValueError, match=f"shard='{shard}': expected i/n with 0 <= i < n"):
            exactness.main(quick(shard=shard))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"greedy_prompts": 0}, "greedy_prompts=0; expected at least 1"),
        ({"greedy_prompts": -1}, "greedy_prompts=-1; expected at least 1"),
        ({"only": ("prompt_lookup", "promt_lookup")}, "only names 'promt_lookup'; did you mean 'prompt_lookup'"),
        (
            {"only": ("suffix",), "drafter.name": "prompt_lookup"},
            "only names 'suffix'; expected drafters: prompt_lookup",
        ),
    ],
)
def test_what_is_asked_of_a_model_must_exist(options: dict[str, Any], message: str) -> None:
    # Before the model is read: there is none.
    config = build.load_config("configs/exactness.py", "nowhere/target", options)
    with pytest.raises(ValueError, match=message):
        next(exactness.real_cases(config, Console()))


def test_the_shards_together_are_all_cases() -> None:
    cases = [(name, list) for name in "abcde"]
    shards = [[name for name, _ in exactness.shard_of(iter(cases), f"{i}/3")] for i in range(3)]
    assert shards == [["a", "d"], ["b", "e"], ["c"]]
