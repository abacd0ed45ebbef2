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
    assert prompts == template_prompts({"towers": TEXT}, 3)
    assert "towers-translate: 3" in capsys.readouterr().out
    assert set(json.loads((tmp_path / "run/prompts.jsonl").read_text().splitlines()[0])) == {"source", "id", "prompt"}
