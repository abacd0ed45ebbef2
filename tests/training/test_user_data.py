"""Data sets of one's own: what carries loss, what is read, what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from specjax.models.tokenizer import Tokenizer
from specjax.testing import tiny_target
from specjax.training import data, user_data
from specjax.training.user_data import DatasetConfig, chat_document, dataset_documents, dataset_rows

datasets = pytest.importorskip("datasets")

CHAT = [
    {"role": "user", "content": "a loop"},
    {"role": "assistant", "content": "it runs"},
    {"role": "user", "content": "and then"},
    {"role": "assistant", "content": "it ends"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_target().tokenizer


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def spans(document, tokenizer):
    """The texts of the answers in a document."""
    mask = np.concatenate([[False], document.mask, [False]])
    edges = np.flatnonzero(np.diff(mask))
    return [tokenizer.decode(document.tokens[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.pitfall("SpecForge#895,#885")
def test_every_assistant_turn_carries_loss_up_to_its_end_and_nothing_else_does(tokenizer):
    (document,) = chat_document(CHAT, tokenizer)
    assert spans(document, tokenizer) == ["it runs", "it ends"]
    whole = tokenizer.render_chat(CHAT, add_generation_prompt=False)
    assert tokenizer.decode(document.tokens, skip_special=False) == whole
    # Each answer ends in the end of turn, which the model must learn to write, and stands behind its prompt as at
    # inference.
    ends = np.flatnonzero(document.mask & ~np.append(document.mask[1:], False))
    assert all(document.tokens[end] in tokenizer.eos_ids for end in ends)
    prompt = tokenizer.apply_chat(CHAT[:1])
    assert document.tokens[: document.prompt_length].tolist() == prompt
    assert document.mask[document.prompt_length] and not document.mask[: document.prompt_length].any()


def test_an_answer_is_rendered_as_the_target_wrote_it(tokenizer):
    """One turn and its answer, against the rendering of answers that the target wrote itself."""
    ids = [*tokenizer.encode("it runs", add_special=False), tokenizer.eos_ids[0]]
    answer = data.Answer("x", 0, 0.0, "a loop", tuple(ids), "it runs", "stop")
    expected = data.render(tokenizer, answer)
    (document,) = chat_document(CHAT[:2], tokenizer)
    n = len(expected.tokens)
    assert document.tokens[:n].tolist() == expected.tokens.tolist()
    assert document.mask[:n].tolist() == expected.mask.tolist() and not document.mask[n:].any()


def test_a_template_that_rewrites_earlier_turns_gives_a_document_an_answer(tokenizer):
    import dataclasses

    template = (
        "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}<{{ m.role }}>..."
        "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    rewriting = dataclasses.replace(tokenizer, chat_template=template)
    first, second = chat_document(CHAT, rewriting)
    assert [spans(d, rewriting) for d in (first, second)] == [["it runs"], ["it ends"]]
    assert rewriting.decode(second.tokens, skip_special=False) == (
        "<user>a loop<assistant>...<user>and then<assistant>it ends"
    )
    crooked = dataclasses.replace(tokenizer, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}{{ 1 }}")
    with pytest.raises(ValueError, match="writes an assistant's turn differently"):
        chat_document(CHAT, crooked)


@pytest.mark.parametrize("form", ["jsonl", "parquet", "arrow", "directory"])
def test_local_files_of_every_form(form, tokenizer, tmp_path):
    rows = [{"messages": CHAT[:2], "id": i} for i in range(3)]
    path = tmp_path / f"chats.{form}"
    made = datasets.Dataset.from_list(rows)
    if form == "jsonl":
        lines(path, rows)
    elif form == "parquet":
        made.to_parquet(str(path))
    else:
        made.save_to_disk(str(tmp_path / "saved"))
        path = tmp_path / "saved" if form == "directory" else next((tmp_path / "saved").glob("*.arrow"))
    found = dataset_documents(DatasetConfig(path=str(path), max_rows=2), tokenizer)
    assert [spans(d, tokenizer) for d in found] == [["it runs"], ["it runs"]]


def test_other_names_of_turns_and_plain_text(tokenizer, tmp_path):
    turns = [{"from": "human", "value": "a loop"}, {"from": "gpt", "value": "it runs"}]
    path = lines(tmp_path / "share.jsonl", [{"conversations": turns}])
    (document,) = dataset_documents(DatasetConfig(path=str(path), field="conversations"), tokenizer)
    assert document.tokens.tolist() == chat_document(CHAT[:2], tokenizer)[0].tokens.tolist()
    path = lines(tmp_path / "text.jsonl", [{"text": "it runs"}, {"text": "  "}])
    (document,) = dataset_documents(DatasetConfig(path=str(path), kind="plain", field="text"), tokenizer)
    assert document.mask.all() and document.tokens[-1] == tokenizer.eos_ids[0]


def test_tokens_are_kept_under_a_hash_of_text_tokenizer_and_template(tokenizer, tmp_path, monkeypatch):
    import dataclasses

    config = DatasetConfig(path=str(lines(tmp_path / "chats.jsonl", [{"messages": CHAT}] * 2)))
    cache = tmp_path / "tokens"
    made = dataset_documents(config, tokenizer, cache)
    dataset_documents(config, dataclasses.replace(tokenizer, chat_template=" " + tokenizer.chat_template), cache)
    assert len(list(cache.iterdir())) == 2  # another template, other tokens
    lines(tmp_path / "again.jsonl", [{"messages": CHAT}] * 2)
    monkeypatch.setattr(user_data, "_chat", lambda *_: pytest.fail("tokenised again"))
    again = dataset_documents(DatasetConfig(path=str(tmp_path / "again.jsonl")), tokenizer, cache)
    for a, b in zip(made, again, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.mask.tolist() == b.mask.tolist()
        assert a.prompt_length == b.prompt_length


def test_rows_are_packed_and_held_out_documents_are_apart(tokenizer, tmp_path):
    texts = [f"{'it runs ' * (i % 4 + 1)}{i}" for i in range(60)]
    chats = [{"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": t}]} for t in texts]
    config = DatasetConfig(path=str(lines(tmp_path / "chats.jsonl", chats)))
    found = dataset_rows(config, tokenizer, row_length=96, held_out_rows=4)
    assert found.documents == 60 and found.cut == 0 and found.held_out.rows <= 4

    def answers(rows):
        batch = rows.text
        made = [
            tokenizer.decode(batch.tokens[b][(batch.segments[b] == s) & batch.response[b]])
            for b in range(len(batch.tokens))
            for s in range(1, batch.segments[b].max() + 1)
        ]
        return set(made)

    assert answers(found.train).isdisjoint(answers(found.held_out))
    assert answers(found.train) | answers(found.held_out) <= set(texts)
    assert len(found.answer_tokens) == int(found.train.text.response.sum())
    with pytest.raises(ValueError, match="too few to hold out 99 rows"):
        dataset_rows(config, tokenizer, row_length=96, held_out_rows=99)
    # Plain text goes on in further rows.
    path = lines(tmp_path / "text.jsonl", [{"text": "it runs " * 100}] * 4)
    plain = DatasetConfig(path=str(path), kind="plain", field="text")
    found = dataset_rows(plain, tokenizer, row_length=64, held_out_rows=2)
    assert found.cut == 0 and found.train.text.tokens.size + 2 * 64 >= found.tokens


@pytest.mark.parametrize(
    ("rows", "options", "error", "says"),
    [
        ([{"messages": CHAT}], {"field": "text"}, ValueError, "has no field 'text'; it has messages"),
        ([], {}, ValueError, "is empty"),
        ([{"messages": [CHAT[0]]}], {}, ValueError, "none with an assistant's turn"),
        ([{"messages": "hello"}], {}, ValueError, "row 0: expected a list of turns"),
        ([{"messages": [{"who": "me"}]}], {}, ValueError, "a turn has the fields who; expected role and content"),
        ([{"text": ["a"]}], {"kind": "plain", "field": "text"}, ValueError, "row 0: expected text"),
    ],
)
def test_one_error_that_names_what_is_wrong(rows, options, error, says, tokenizer, tmp_path):
    path = lines(tmp_path / "chats.jsonl", rows)
    with pytest.raises(error, match=says):
        dataset_documents(DatasetConfig(path=str(path), **options), tokenizer)


def test_data_sets_that_cannot_be_had(tokenizer, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        dataset_documents(DatasetConfig(path=str(tmp_path / "nowhere.jsonl")), tokenizer)
    with pytest.raises(ValueError, match="kind 'poem' is unknown"):
        DatasetConfig(path="x", kind="poem")

    def refuse(*_, **__):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'org/secret' is a gated dataset on the Hub.")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(PermissionError, match="'org/secret' is gated: accept its terms at .*hf auth login"):
        dataset_documents(DatasetConfig(path="org/secret"), tokenizer)
