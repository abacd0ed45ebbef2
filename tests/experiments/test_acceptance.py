"""Rules side by side: exact figures, the orders of theory, and what the program writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import acceptance
from specjax import build


def config(**overrides):
    return build.load_config("configs/acceptance.py", "quick", overrides)


def test_rules_are_ordered_as_theory_says(in_workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config(tables=2, drafts=4, sampled_vocab=8)
    with settings.unlocked():
        settings.trees = {"chain of 1": (1,), "chain of 2": (1, 1), "3 children": (3,)}
    acceptance.main(settings)
    found = json.loads((in_workdir / "results.json").read_text())
    assert found["meta"]["schema"] == "specjax.acceptance/1"
    proved = [order for order in found["orders"] if order["proved"]]
    assert all(order["held"] == order["tables"] == 2 for order in proved)
    says = {(order["tree"], order["says"]) for order in proved if order["exact"]}
    assert ("chain of 1", "one_hot, iid = sum p q") in says
    assert ("chain of 1", "recursive, iid = sum min(p, q)") in says
    assert ("chain of 2", "block, iid >= recursive, iid") in says
    assert ("3 children", "k_seq, iid >= (1 - 1/e) of the bound") in says
    rows = {(row["tree"], row["exact"], row["rule"]): row for row in found["rows"]}
    exact = rows["chain of 2", True, "block, iid"]
    assert exact["half_width"] == 0 and exact["accepted"] > rows["chain of 2", True, "recursive, iid"]["accepted"]
    assert rows["chain of 2", False, "block, iid"]["half_width"] > 0
    assert ("3 children", True, "block, iid") not in rows
    # More children, more is accepted.
    one, three = (rows[tree, True, "recursive, iid"]["accepted"] for tree in ("chain of 1", "3 children"))
    assert three > one
    out = capsys.readouterr().out
    assert "accepted tokens a step, 3 children" in out and "orders hold in every table" in out


def test_a_violated_theorem_ends_the_program(in_workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "THEOREMS", (("one_hot, iid", "recursive, iid"),))
    settings = config(tables=1, drafts=2, sampled_vocab=4)
    with settings.unlocked():
        settings.trees = {"chain of 1": (1,)}
    with pytest.raises(ValueError, match="a theorem does not hold: chain of 1, enumerated: one_hot, iid >= recursive"):
        acceptance.main(settings)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"tables": 0}, "tables=0"),
        ({"likeness": 1.0}, "likeness=1.0; expected a number"),
        ({"exact_vocab": 2}, "tree '3 children' is"),
    ],
)
def test_settings_out_of_range_are_refused(overrides, message, in_workdir: Path) -> None:
    with pytest.raises(ValueError, match=message):
        acceptance.main(config(**overrides))
