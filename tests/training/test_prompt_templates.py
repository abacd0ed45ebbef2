"""Prompts made from text: what passages are, no piece used twice, a file that can be answered."""

import json
import re

import pytest

from experiments import make_prompts
from specjax import build
from specjax.training.prompt_templates import (
    LONGEST,
    PASSAGE_TASKS,
    SHORTEST,
    SUBJECTS,
    TASKS,
    passages,
    template_prompts,
)
from specjax.training.regenerate import read_prompts

SENTENCES = [
    f"The tower number {i} was built by the people of the old town in the year {1200 + i}." for i in range(200)
]
TEXT = "\n\n".join(" ".join(SENTENCES[i : i + 4]) for i in range(0, 200, 4))


def test_passages_are_whole_sentences_of_a_paragraph():
    found = passages(TEXT)
    assert [s for p in found for s in re.split(r"(?<=\.) ", p)] == SENTENCES
    assert all(SHORTEST <= len(p) <= LONGEST for p in found)


def test_a_tokenised_corpus_reads_like_text():
    corpus = (
        " = A heading = \n \n The lobster ( <unk> gammarus ) is large . It may grow to 60 @.@ 5 cm , and bears claws ,"
        ' which are its pride ; it \'s found off Norway ( in the north @-@ east ) . It is called " red " on cooking ,'
        " for its shell turns from a deep blue into a bright colour . \n = = Another = = \n Too short . \n"
    )
    assert passages(corpus) == [
        "It may grow to 60.5 cm, and bears claws, which are its pride; it's found off Norway (in the north-east). "
        'It is called "red" on cooking, for its shell turns from a deep blue into a bright colour.'
    ]


def test_every_task_has_its_prompts_and_no_piece_is_used_twice():
    prompts = template_prompts({"towers": TEXT, "again": TEXT}, per_task=9, seed=3)
    assert len({(p.source, p.id) for p in prompts}) == len(prompts) == 9 * len(TASKS)
    for task in TASKS:
        assert sum(p.source.endswith(f"-{task}") for p in prompts) == 9
    used = [n for p in prompts if p.source.startswith("towers") for n in set(re.findall(r"number (\d+)", p.text))]
    from_passages = [
        n
        for p in prompts
        if p.source.removeprefix("towers-") in PASSAGE_TASKS
        for n in set(re.findall(r"number (\d+)", p.text))
    ]
    assert used and len(from_passages) == len(set(from_passages))
    assert prompts == template_prompts({"towers": TEXT, "again": TEXT}, per_task=9, seed=3)
    assert prompts != template_prompts({"towers": TEXT, "again": TEXT}, per_task=9, seed=4)


def test_subjects_are_written_and_asked_about_once():
    prompts = template_prompts({"towers": TEXT}, per_task=7)
    asked = [p.text for p in prompts if p.source == "subjects-ask"]
    assert len(set(asked)) == 7 and not any("{" in text for text in asked)
    assert len(set(SUBJECTS)) == len(SUBJECTS)
    with pytest.raises(ValueError, match=f"901 prompts .* subjects for {8 * len(SUBJECTS)}"):
        template_prompts({"towers": "\n\n".join([TEXT] * 99)}, per_task=901)


@pytest.mark.parametrize(
    ("texts", "number", "says"),
    [
        ({"towers": TEXT}, 0, "per_task=0; expected at least 1"),
        ({}, 1, "texts is empty"),
        ({"towers": TEXT}, 60, "'towers' has 50 pieces .* need 240: ask for fewer"),
    ],
)
def test_what_cannot_be_made(texts, number, says):
    with pytest.raises(ValueError, match=says):
        template_prompts(texts, number)


def test_the_program_writes_what_regenerate_reads(tmp_path, monkeypatch, capsys):
    (tmp_path / "towers.txt").write_text(TEXT)
    monkeypatch.setattr(make_prompts._main, "workdir", lambda: tmp_path / "run")
    config = build.load_config("configs/make_prompts.py", str(tmp_path / "towers.txt"), {"per_task": 3})
    make_prompts.main(config)
    prompts = read_prompts(tmp_path / "run/prompts.jsonl")
    made = template_prompts({"towers": TEXT}, 3)
    assert prompts != made and sorted(prompts, key=str) == sorted(made, key=str)
    assert not (tmp_path / "run/held_out.jsonl").exists()
    assert "towers-translate: 3" in capsys.readouterr().out
    assert set(json.loads((tmp_path / "run/prompts.jsonl").read_text().splitlines()[0])) == {"source", "id", "prompt"}


@pytest.fixture
def collections(tmp_path, monkeypatch):
    """A config with two collections, of which one prompt is answered already."""
    codes = [{"instruction": f"Write {n}.", "input": "In C." if n else "", "response": "x"} for n in range(6)]
    (tmp_path / "code.json").write_text(json.dumps(codes))
    maths = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(5)]
    (tmp_path / "maths.jsonl").write_text("".join(json.dumps(row) + "\n" for row in maths))
    (tmp_path / "towers.txt").write_text(TEXT)
    answer = {"source": "code", "id": 1, "temperature": 0.0, "prompt": "Write 1.\n\nIn C.", "response_ids": [1]}
    (tmp_path / "done.jsonl").write_text(json.dumps(answer | {"response": "y", "finish": "stop"}) + "\n")
    monkeypatch.setenv("SPECJAX_DATA", str(tmp_path))
    monkeypatch.setattr(make_prompts._main, "workdir", lambda: tmp_path / "run")
    config = build.load_config("configs/make_prompts.py", str(tmp_path / "towers.txt"), {"per_task": 2})
    config.collections = {"code": {"path": "code.json", "count": 5}, "maths": {"path": "maths.jsonl", "count": 3}}
    config.answered, config.held_out = ("done.jsonl",), 4
    return config


def test_collections_beside_templates(collections, tmp_path):
    make_prompts.main(collections)
    kept, held = (read_prompts(tmp_path / "run" / name) for name in ("prompts.jsonl", "held_out.jsonl"))
    assert len(held) == 4 and not {p.text for p in held} & {p.text for p in kept}
    drawn = [p for p in (*kept, *held) if p.source in ("code", "maths")]
    assert {p.text for p in drawn if p.source == "code"} == {
        "Write 0.",
        *(f"Write {n}.\n\nIn C." for n in (2, 3, 4, 5)),
    }
    assert len({p.text for p in drawn if p.source == "maths"}) == 3 and {p.id for p in drawn} <= set(range(6))
    # The same again, and others by another seed.
    before = (tmp_path / "run/prompts.jsonl").read_text()
    make_prompts.main(collections)
    assert (tmp_path / "run/prompts.jsonl").read_text() == before
    collections.shuffle_seed = 12
    make_prompts.main(collections)
    assert (tmp_path / "run/prompts.jsonl").read_text() != before


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("collections.code.count", 6, "collections.code.count=6; expected 0 to 5, the prompts of code.json"),
        ("held_out", -1, "held_out=-1 of [0-9]+ prompts; expected 0 or more"),
        ("held_out", 10_000, "held_out=10000 of [0-9]+ prompts; .* fewer than all"),
    ],
)
def test_more_than_there_is(collections, field, value, says):
    collections.update_from_flattened_dict({field: value})
    with pytest.raises(ValueError, match=says):
        make_prompts.main(collections)
