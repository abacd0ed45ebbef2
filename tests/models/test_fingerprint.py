"""A tokenizer's fingerprint is of what it does: spellings of one tokenizer agree, other tokenizers do not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from specjax.checkpoints import drafters
from specjax.checkpoints.vocabularies import byte_level_bpe
from specjax.drafting.text_store import index_texts, load_store, save_store
from specjax.models import fingerprint
from specjax.models.tokenizer import Tokenizer
from specjax.testing import tiny_target
from specjax.training import Document, HiddenStates, StoreConfig
from specjax.training.hidden_states import write_store
from specjax.training.identity import target_identity
from tests.models.test_tokenizer import released

SHIPPED = "4076e40e422c4dcf"  # What the zoo's entries record.
WORDS = ["1", "2", "12", "a", "b", "ab", "\u0120", "\u0120a", "<|end|>"]
MERGES = ["1 2", "a b", "\u0120 a"]


def changed(backend: tokenizers.Tokenizer, **parts: Any) -> tokenizers.Tokenizer:
    """The same tokenizer with other entries in its tokenizer.json."""
    return tokenizers.Tokenizer.from_str(json.dumps({**json.loads(backend.to_str()), **parts}))


def published(backend: tokenizers.Tokenizer, individual: bool = True) -> tokenizers.Tokenizer:
    """The cut as the hub's tokenizer.json of SmolLM2 says it."""
    digits = {"type": "Digits", "individual_digits": individual}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return changed(backend, pre_tokenizer={"type": "Sequence", "pretokenizers": [digits, level]})


def small(words: list[str] = WORDS, merges: list[str] = MERGES, special: int = 1) -> tokenizers.Tokenizer:
    return byte_level_bpe("smollm", words, [1] * (len(words) - special) + [3] * special, merges)


def test_both_spellings_of_the_shipped_tokenizer_are_the_one_that_the_zoo_records(data_dir: Path) -> None:
    content = released("smollm2", data_dir)
    ours = byte_level_bpe("smollm", content["tokens"], content["token_type"], content["merges"])
    theirs = published(ours)
    assert fingerprint.spelling(ours) != fingerprint.spelling(theirs)
    assert fingerprint.behaviour(ours) == fingerprint.behaviour(theirs) == SHIPPED
    for name in drafters.zoo_entries():
        recorded = json.loads((drafters.ZOO / name / "config.json").read_text())["target"]
        assert recorded["tokenizer"] == SHIPPED
    # A head that was saved when the spelling was recorded.
    held = Tokenizer(ours, eos_ids=(2,))
    assert held.fingerprint_as("c43aad018d48a2d8") == "c43aad018d48a2d8"
    assert held.fingerprint_as("0123456789abcdef") == held.fingerprint_as(None) == SHIPPED


def test_spellings_that_do_the_same_agree() -> None:
    one = small()
    mine = fingerprint.behaviour(one)
    assert fingerprint.behaviour(published(one)) == mine
    tokens = [{**token, "normalized": True} for token in json.loads(one.to_str())["added_tokens"]]
    assert fingerprint.behaviour(changed(one, added_tokens=tokens)) == mine
    limited = changed(one)
    limited.enable_truncation(2)
    limited.enable_padding(length=5)
    assert fingerprint.behaviour(limited) == mine
    assert limited.truncation is not None and limited.padding is not None  # left as they were


def test_what_does_something_else_differs() -> None:
    """Each of these gives some text other ids, or some id another text."""
    one = small()
    begin = {"id": "<|end|>", "type_id": 0}
    others = {
        "digits in runs": published(one, individual=False),
        "other merges": small(merges=["1 2", "\u0120 a"]),
        "merges in another order": small(["a", "b", "c", "ab", "bc", "<|end|>"], ["b c", "a b"]),
        "the first of these": small(["a", "b", "c", "ab", "bc", "<|end|>"], ["a b", "b c"]),
        "ids swapped": small([*WORDS[1::-1], *WORDS[2:]]),
        "one token more": small([*WORDS, "<|more|>"], special=2),
        "not special": byte_level_bpe("smollm", WORDS, [1] * 8 + [4], MERGES),
        "no cut of words": changed(one, pre_tokenizer=None),
        "text normalised": changed(one, normalizer={"type": "Lowercase"}),
        "a token at the beginning": changed(
            one,
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": begin}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [8], "tokens": ["<|end|>"]}},
            },
        ),
        "other text": changed(one, decoder=None),
    }
    found = {name: fingerprint.behaviour(other) for name, other in others.items()}
    assert len({fingerprint.behaviour(one), *found.values()}) == len(others) + 1, found


def test_a_shipped_vocabulary_with_other_merges_or_one_more_token_is_another(data_dir: Path) -> None:
    content = released("smollm2", data_dir)
    tokens, types, merges = content["tokens"], content["token_type"], content["merges"]
    swapped = [merges[1], merges[0], *merges[2:]]
    assert fingerprint.behaviour(byte_level_bpe("smollm", tokens, types, swapped)) != SHIPPED
    more = byte_level_bpe("smollm", tokens, types, merges)
    more.add_special_tokens(["<|more|>"])
    assert fingerprint.behaviour(more) != SHIPPED


@pytest.fixture
def target():
    return tiny_target()


def old_record(target) -> str:
    return fingerprint.spelling(target.tokenizer.backend)


def test_records_of_the_older_form_are_taken_for_the_tokenizer_that_they_are_of(target, tmp_path: Path) -> None:
    old, other = old_record(target), "0123456789abcdef"
    assert old != target.tokenizer.fingerprint()
    assert target_identity(target, {"tokenizer": old})["tokenizer"] == old
    assert target_identity(target, {"tokenizer": other}) == target_identity(target)

    store = index_texts(["some text"], target.tokenizer)
    save_store(tmp_path / "old.npz", dataclasses.replace(store, fingerprint=old))
    assert np.array_equal(load_store(tmp_path / "old.npz", target.tokenizer).tokens, store.tokens)
    save_store(tmp_path / "other.npz", dataclasses.replace(store, fingerprint=other))
    with pytest.raises(ValueError, match=f"fingerprint {other}, the target's is {target.tokenizer.fingerprint()}"):
        load_store(tmp_path / "other.npz", target.tokenizer)


def test_hidden_states_of_the_older_form_are_read_and_gone_on_with(target, tmp_path: Path) -> None:
    documents = [Document(np.arange(5, 45, dtype=np.int32) + i, 4) for i in range(4)]
    config = StoreConfig(row_length=64, shard_rows=2, pass_rows=2)
    write_store(tmp_path, target, documents, config)
    manifest = tmp_path / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "tokenizer": old_record(target)}))
    assert HiddenStates(tmp_path, target).rows == content["rows"]
    write_store(tmp_path, target, documents, config)
    manifest.write_text(json.dumps({**content, "tokenizer": "0123456789abcdef"}))
    with pytest.raises(ValueError, match="tokenizer: found '0123456789abcdef'"):
        HiddenStates(tmp_path, target)
    with pytest.raises(ValueError, match="tokenizer: found '0123456789abcdef'"):
        write_store(tmp_path, target, documents, config)


def test_drafters_and_runs_of_the_older_form_are_loaded(target, tmp_path: Path) -> None:
    from specjax import build
    from specjax.checkpoints.rundir import RunDirectory

    saved = drafters.SavedDrafter("draft_model", target.config, target.params, {}, ())
    drafters.save_drafter(tmp_path / "draft", saved, target)
    file = tmp_path / "draft" / "config.json"
    content = json.loads(file.read_text())
    assert content["target"]["tokenizer"] == target.tokenizer.fingerprint()
    file.write_text(json.dumps({**content, "target": {**content["target"], "tokenizer": old_record(target)}}))
    assert drafters.load_drafter(tmp_path / "draft", target).method == "draft_model"
    file.write_text(json.dumps({**content, "target": {**content["target"], "tokenizer": "0123456789abcdef"}}))
    with pytest.raises(ValueError, match=r"it expects tokenizer '0123456789abcdef' \(here"):
        drafters.load_drafter(tmp_path / "draft", target)

    run = RunDirectory(tmp_path / "run")
    run.claim({}, made_for={**target_identity(target), "tokenizer": old_record(target)})
    build.params_of(tmp_path / "run", target)
    run.claim({}, made_for=target_identity(target, run.made_for()))
