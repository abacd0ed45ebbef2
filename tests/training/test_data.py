import dataclasses
import gzip
import json

import numpy as np
import pytest

from specjax.testing import tiny_target
from specjax.training import data, feed
from specjax.training.data import Batch, Document
from tests.training.common import answers


def document(length, prompt):
    return Document(np.arange(100, 100 + length, dtype=np.int32), prompt)


@pytest.mark.pitfall("SpecForge#895,#885")
def test_labels_are_shifted_by_one_and_stay_within_the_answer():
    batch = data.lay_out([[document(5, 3), document(4, 1)]], 12)
    # Position 2 predicts the first answer token; the last token of each document predicts nothing.
    assert np.flatnonzero(batch.predicts[0]).tolist() == [2, 3, 5, 6, 7]
    assert batch.segments[0].tolist() == [1] * 5 + [2] * 4 + [0] * 3
    assert batch.positions[0, 5:9].tolist() == [0, 1, 2, 3]


def test_packing_places_every_document_once():
    rng = np.random.default_rng(0)
    made = [document(int(n), 1) for n in rng.integers(2, 60, 200)]
    rows, cut = data.pack(made, 50, open_rows=8)
    lengths = sorted(min(len(d.tokens), 50) for d in made)
    assert sorted(len(d.tokens) for row in rows for d in row) == lengths
    assert cut == sum(len(d.tokens) > 50 for d in made)
    assert all(sum(len(d.tokens) for d in row) <= 50 for row in rows)
    used = sum(lengths) / (50 * len(rows))
    assert used > 0.9


@pytest.mark.parametrize("start", [0, 3, 7, 11])
def test_batches_are_a_function_of_the_step(start):
    fresh, resumed = feed.batches(10, 3, 5, 0), feed.batches(10, 3, 5, start)
    want = [next(fresh) for _ in range(16)][start:]
    for (step, rows), (other, same) in zip(want, resumed, strict=False):
        assert step == other
        np.testing.assert_array_equal(rows, same)


def test_an_epoch_shows_no_row_twice_and_the_next_differs():
    stream = feed.batches(12, 4, 0, 0)
    epochs = [np.concatenate([next(stream)[1] for _ in range(3)]) for _ in range(2)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(ValueError, match="batch=5 rows of a data set of 4 rows"):
        next(feed.batches(4, 5, 0, 0))


def test_text_of_another_tokenizer_is_refused(tmp_path):
    """As ids it would train without a word."""
    target, path = tiny_target(layers=1, width=16), tmp_path / "answers.jsonl"

    def written(change):
        rows = [dataclasses.asdict(answer) for answer in answers()]
        path.write_text("\n".join(json.dumps(row | change(row["response_ids"])) for row in rows))
        return data.text_rows(path, target, 64)

    assert written(lambda ids: {}).rows and len(data.draft_vocabulary(path, target, 8)) == 8
    assert written(lambda ids: {"response": ""}).rows  # Nothing to hold the ids against.
    other = "answers.jsonl was written with another tokenizer than that of 'tiny': "
    with pytest.raises(ValueError, match=other + "the ids of made 0 read '.*', and its text is '.*regenerate"):
        written(lambda ids: {"response_ids": [3 + (i + 90) % 256 for i in ids]})
    with pytest.raises(ValueError, match=other + "id 9000 in it is outside the vocabulary of 259"):
        written(lambda ids: {"response_ids": [*ids, 9000]})
    with pytest.raises(ValueError, match=other):
        data.draft_vocabulary(path, target, 8)


def test_draft_vocabulary_is_the_frequent_tokens_and_the_end():
    made = answers()
    counts = np.bincount(np.concatenate([a.response_ids for a in made]))
    vocab = data.frequent_tokens(made, 5, (0,))
    assert vocab.dtype == np.int32 and (np.diff(vocab) > 0).all() and 0 in vocab
    rest = [t for t in vocab if t != 0]
    assert min(counts[rest]) >= np.sort(np.delete(counts, 0))[-4]
    with pytest.raises(ValueError, match="draft vocabulary of 9999 tokens"):
        data.frequent_tokens(made, 9999)


def test_a_token_that_must_be_in_the_vocabulary_is_even_if_never_written():
    assert 250 in data.frequent_tokens(answers(), 5, (250,))


def write(path, lines):
    text = "".join(line + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def line(**changes):
    entry = dict(source="s", id=1, temperature=0.0, prompt="p", response_ids=[1], response="r", finish="stop")
    entry |= changes
    return json.dumps({k: v for k, v in entry.items() if v is not None}, ensure_ascii=False)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_answers_survive_any_text(tmp_path, name):
    found = data.read_answers(write(tmp_path / name, [line(response="a\u2028b\x85c"), "", line(id=2)]))
    assert [a.response for a in found] == ["a\u2028b\x85c", "r"]


def test_a_directory_of_parts_is_read_in_order(tmp_path):
    write(tmp_path / "part-000001.jsonl", [line(id=2)])
    write(tmp_path / "part-000000.jsonl", [line(id=1)])
    assert [a.id for a in data.read_answers(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([line(), "{oops"], r"a.jsonl:2 is not JSON"),
        ([line(response_ids=["a"])], r"a.jsonl:1 has response_ids=\['a'\]; expected a list of token ids"),
        ([line(response_ids=[-1])], r"a.jsonl:1 has response_ids=\[-1\]; expected a list of token ids"),
        ([line(), line(response_ids=5)], r"a.jsonl:2 has response_ids=5; expected a list of token ids"),
        ([line(temperature="x")], r"a.jsonl:1 has temperature='x'; expected a number of 0 or more"),
        ([line(prompt=5)], r"a.jsonl:1 has prompt=5; expected a text"),
        (["[1]"], r"a.jsonl:1 is list"),
        ([line(finish=None)], r"lacks finish; it has source, id"),
        ([], "holds no answers"),
    ],
)
def test_bad_text_is_one_clear_error(tmp_path, lines, says):
    with pytest.raises(ValueError, match=says):
        data.read_answers(write(tmp_path / "a.jsonl", lines))


def test_missing_text_is_one_clear_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no training text at .*nowhere"):
        data.read_answers(tmp_path / "nowhere.jsonl")


def test_documents_are_rendered_as_at_inference():
    target = tiny_target()
    made = answers()[0]
    rendered = data.render(target.tokenizer, made)
    prompt = target.tokenizer.apply_chat([{"role": "user", "content": made.prompt}])
    assert rendered.tokens.tolist() == [*prompt, *made.response_ids]
    assert rendered.prompt_length == len(prompt)


def test_predicts_is_the_same_in_numpy_and_jax():
    import jax.numpy as jnp

    batch = data.lay_out([[document(5, 3), document(4, 1)], [document(9, 2)]], 12)
    other = Batch(*(jnp.asarray(x) for x in (batch.tokens, batch.positions, batch.segments, batch.response)))
    np.testing.assert_array_equal(batch.predicts, np.asarray(other.predicts))


def test_a_file_that_is_not_whole_or_no_text_is_named(tmp_path):
    whole = gzip.compress("\n".join([line()] * 50).encode())
    for name, content, message in (
        ("cut.jsonl.gz", whole[:-20], "cut.jsonl.gz is no whole gzip file"),
        ("plain.jsonl.gz", line().encode(), "plain.jsonl.gz is no whole gzip file"),
        ("damaged.jsonl.gz", whole[:20] + b"\xff" * 20 + whole[40:], "damaged.jsonl.gz is no whole gzip file"),
        ("bytes.jsonl", b"\xff\xfe", "bytes.jsonl is not UTF-8"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            data.read_answers(tmp_path / name)


def test_rows_without_room_for_a_token_behind_another_are_refused(tmp_path):
    for wrong, message in (((1, 4), "row_length=1"), ((64, 0), "held_out_rows=0"), ((64, -1), "held_out_rows=-1")):
        with pytest.raises(ValueError, match=message):
            data.text_rows(tmp_path / "unread.jsonl", tiny_target(), wrong[0], max_rows=wrong[1])
