"""A draft with other token ids: the map between vocabularies, its own stream, and that nothing is lost."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from specjax.checkpoints.directory import save_target
from specjax.checkpoints.llama2c import read_tokenizer
from specjax.checkpoints.vocabularies import BYTE, CONTROL, NORMAL, UNKNOWN, byte_level_bpe, sentencepiece_bpe
from specjax.decoding import Completion, Verdict, prefill
from specjax.decoding.tree import chain
from specjax.drafting import PromptLookup
from specjax.drafting.ensemble import EnsembleUnion, Members
from specjax.drafting.other_tokenizer import OtherTokenizer, append, restrict
from specjax.drafting.registry import DRAFTERS
from specjax.drafting.token_map import TokenMap, map_tokens
from specjax.models import causal_view, graph, init_cache, init_decoder, merge
from specjax.models.token_bytes import Spelling
from specjax.models.tokenizer import Tokenizer
from specjax.testing import contract, tiny_target
from specjax.verification import Recursive
from tests.drafting import common


def byte_level(tokens: list[str], merges: list[str]) -> Tokenizer:
    backend = byte_level_bpe("gpt-2", ["<|end|>", *tokens], [CONTROL] + [NORMAL] * len(tokens), merges)
    return Tokenizer(backend=backend, eos_ids=(0,))


def pieces(end: str = "</s>") -> Tokenizer:
    tokens = ["<unk>", end, "<0x61>", "<0xC3>", "<0xA9>", "\u2581", "a", "b", "t", "ab", "\u2581a", "\u2581ab", "é"]
    scores = [0.0] * 9 + [-1.0, -2.0, -3.0, -4.0]
    types = [UNKNOWN, CONTROL, BYTE, BYTE, BYTE] + [NORMAL] * 8
    return Tokenizer(backend=sentencepiece_bpe(tokens, scores, types, space_prefix=True), eos_ids=(1,))


# Bytes C3 A9 spell é; Ġ is a space.
TARGET = byte_level(["a", "b", "t", "Ġ", "Ã", "©", "at", "Ġa", "Ã©"], ["a t", "Ġ a", "Ã ©"])


def test_tokens_are_shared_by_their_bytes() -> None:
    draft = pieces()
    made = map_tokens(TARGET, draft, 12, names=("target", "draft"))

    def name(tokenizer: Tokenizer, i: int) -> str | None:
        return tokenizer.backend.id_to_token(int(i))

    shared = {
        name(TARGET, t): name(draft, d) for t, d in zip(made.vocab.tolist(), made.draft_ids.tolist(), strict=True)
    }
    # The byte token <0x61> gives way to the letter; a part of é has only byte tokens.
    assert shared == {
        "a": "a",
        "b": "b",
        "t": "t",
        "Ġ": "\u2581",
        "Ã": "<0xC3>",
        "©": "<0xA9>",
        "Ġa": "\u2581a",
        "Ã©": "é",
    }
    spelt = [[name(draft, p) for p in ids[:n]] for ids, n in zip(made.pieces, made.counts, strict=True)]
    assert spelt[7] == ["a", "t"]
    # The letters of a name; those that the draft has not are unknown to it. Ids 10 and 11 stand for nothing.
    assert spelt[0] == ["<unk>"] and spelt[10:] == [["</s>"], ["</s>"]]
    assert (np.diff(made.vocab) > 0).all() and len(set(made.draft_ids.tolist())) == len(made.vocab)


def test_special_tokens_are_shared_by_name() -> None:
    made = map_tokens(TARGET, pieces(end="<|end|>"), 10, names=("target", "draft"))
    assert made.vocab[0] == 0 and made.draft_ids[0] == 1 and made.pieces[0, : made.counts[0]].tolist() == [1]


@pytest.mark.parametrize("name", [pytest.param("qwen2.5", marks=pytest.mark.slow), "stories"])
def test_published_tokenizers(data_dir, name: str) -> None:
    """Whatever the target writes, the draft's ids spell the same bytes; a shared token is one id."""

    def published(which: str) -> Tokenizer:
        with gzip.open(data_dir / "tokenizers" / f"{which}.tokenizer.json.gz", "rt") as stream:
            found = json.load(stream)
        backend = byte_level_bpe(found["pre"], found["tokens"], found["token_type"], found["merges"])
        return Tokenizer(backend=backend, eos_ids=(0,))

    target = published("smollm2")
    draft = read_tokenizer(data_dir / "models_tiny/tok512.bin", 512) if name == "stories" else published(name)
    made = map_tokens(target, draft, target.vocab_size, names=("target", "draft"))
    mine, theirs = Spelling(target), Spelling(draft)
    assert len(made.vocab) > (200 if name == "stories" else 20_000)
    for i in range(target.vocab_size):
        ids = made.pieces[i, : made.counts[i]].tolist()
        wanted = mine.specials[i].encode() if i in mine.specials else mine.bytes_of[i]
        found = b"".join(theirs.bytes_of.get(j, theirs.specials.get(j, "").encode()) for j in ids)
        assert found == wanted, (i, wanted, found)
    assert all(made.counts[made.vocab] == 1) and (made.pieces[made.vocab, 0] == made.draft_ids).all()


def test_nothing_shared_is_one_error() -> None:
    other = byte_level(["x", "y"], [])
    mine = Tokenizer(byte_level_bpe("gpt-2", ["<s>", "a"], [CONTROL, NORMAL], []), eos_ids=())
    message = (
        rf"target 'big' \(tokenizer {mine.fingerprint()}, 2 tokens\) and draft 'small' "
        rf"\(tokenizer {other.fingerprint()}, 3 tokens\) share 0 tokens"
    )
    with pytest.raises(ValueError, match=message):
        map_tokens(mine, other, 2, names=("big", "small"))


def test_an_alphabet_that_is_not_known() -> None:
    from tokenizers import models

    with pytest.raises(ValueError, match="decoder is None writes its tokens in no alphabet that is known"):
        Spelling(Tokenizer(Backend(models.WordLevel({"a": 0}, unk_token="a")), eos_ids=()))


# ---- In the loop ----


@functools.cache
def made(vocab: int = common.VOCAB, expansion: float = 2.0, noise: float = 0.3) -> contract.Subject:
    """The target's own network, nearly, under other ids: its drafts are often right. The last ids are not shared.

    A text of the draft begins with a token of its own.
    """
    shapes = common.config(2, vocab)
    sub = common.subject(OtherTokenizer(restrict_shapes(vocab), 3, expansion), vocab=vocab)
    shared = vocab - (3 if vocab > 4 else 1)
    ids = (np.arange(vocab) * 5 + 3) % vocab  # draft id of each target id
    embedding = np.asarray(sub.target["embed"]["embedding"])
    embedding = embedding + noise * embedding.std() * np.random.default_rng(0).normal(size=embedding.shape)
    moved = np.zeros_like(embedding)
    moved[ids] = embedding
    params = {**sub.target, "embed": {"embedding": jnp.asarray(moved, jnp.float32)}}
    config, params = restrict(shapes, params, jnp.asarray(ids[:shared], jnp.int32))
    pieces = np.stack([ids, ids[::-1]], 1).astype(np.int32)
    counts = np.where(np.arange(vocab) < shared, 1, 2).astype(np.int32)
    tables = TokenMap(np.arange(shared, dtype=np.int32), ids[:shared].astype(np.int32), pieces, counts).tables()
    drafter = OtherTokenizer(config, 3, expansion, bos=int(ids[-1]))
    return dataclasses.replace(sub, drafter=drafter, params=params, tables=tables, eos=())


def restrict_shapes(vocab: int):
    shapes = common.config(2, vocab)
    return dataclasses.replace(shapes, head_size=vocab, tie_embeddings=False)


def test_contract() -> None:
    contract.check_drafter(dataclasses.replace(made(), eos=(2, 5)), Recursive)


@pytest.mark.parametrize("vocab", [4])
def test_law(vocab: int) -> None:
    """Also where a token of the target can only come from the target."""
    assert common.law_p_value(made(vocab), Recursive, prompt=(0, 3, 1)) > common.FALSE_ALARM


@functools.cache
def completions() -> list[Completion]:
    return contract.check_equals_autoregressive(made(), Recursive, common.looping_requests())


@pytest.mark.pitfall("vllm#7627")
def test_it_writes_what_the_target_writes() -> None:
    done = completions()
    assert sum(c.accepted[1:].sum() for c in done) > 10
    # Tokens that only the target has were written too, so the stream ran ahead of the text.
    assert any(t >= common.VOCAB - 3 for c in done for t in c.tokens)


def test_the_stream_is_the_text_spelt_and_the_cache_that_of_a_fresh_pass() -> None:
    sub = made()
    loop, weights = sub.loop(Recursive)
    state = prefill(loop, weights, common.looping_requests(), context=contract.CONTEXT, seed=0, buffer=contract.BUFFER)
    state = loop.run(weights, state, 5)
    own = state.drafter
    spelt = []
    for row in range(3):
        text = np.asarray(state.tokens)[row, : int(own.seen[row])]
        spelt.append(
            np.concatenate(
                [[sub.drafter.bos]]
                + [np.asarray(sub.tables["pieces"])[t, : int(sub.tables["counts"][t])] for t in text]
            )
        )
        assert int(own.length[row]) == len(spelt[row])
        np.testing.assert_array_equal(np.asarray(own.stream)[row, : len(spelt[row])], spelt[row])
        # What the last step accepted is in the cache already; the text moved on by that and one more token.
        assert 0 <= int(own.fed[row]) - len(spelt[row]) <= int(state.length[row]) - int(own.seen[row]) - 1
    ids = jnp.asarray(np.stack([s[:20] for s in spelt]))
    network = merge(graph(sub.drafter.config)[0], sub.params)
    _, fresh = network.cached(ids, init_cache(sub.drafter.config, 3, 32), causal_view(jnp.zeros(3, jnp.int32), 20))
    for mine, theirs in zip(own.cache.layers, fresh.layers, strict=True):
        np.testing.assert_allclose(mine.k[:, :20], theirs.k[:, :20], atol=1e-4)
        np.testing.assert_allclose(mine.v[:, :20], theirs.v[:, :20], atol=1e-4)


def test_a_text_begins_once() -> None:
    """Where the target's text brings the draft's first token along, it is not put there again."""
    drafter = OtherTokenizer(restrict_shapes(common.VOCAB), 3, bos=7)
    ids = jnp.arange(common.VOCAB)[:, None]
    tables = {"pieces": ids, "counts": jnp.ones((common.VOCAB,), jnp.int32)}
    state = drafter.init_state({}, {}, None, 2, 32)
    tokens, valid = jnp.asarray([[3, 4, 7], [7, 4, 3]]), jnp.ones((2, 3), bool)
    state = append(drafter._begun(state, tables, tokens, valid), tables, tokens, valid)
    assert state.length.tolist() == [4, 3]
    assert state.stream[0, :4].tolist() == [7, 3, 4, 7] and state.stream[1, :3].tolist() == [7, 4, 3]
    assert drafter._begun(state, tables, tokens, valid).length.tolist() == [4, 3]


def test_what_was_accepted_of_another_draft_is_read_anew() -> None:
    """Of an ensemble's path only the beginning that it drafted itself is in the cache."""
    drafter = OtherTokenizer(restrict_shapes(common.VOCAB), 3)
    state = drafter.init_state({}, {}, None, 4, 32)
    state = state.replace(length=jnp.full((4,), 10), drafted=jnp.broadcast_to(jnp.asarray([1, 2, 3]), (4, 3)))
    # Paths 1 2 3, 1 4, 5 6 7 and 1 2 in a tree of the draft's chain and two others.
    tokens = jnp.broadcast_to(jnp.asarray([1, 2, 3, 4, 5, 6, 7], jnp.int32), (4, 7))
    tree = dataclasses.replace(chain(tokens, laws=None), is_chain=False)
    path = jnp.asarray([[0, 1, 2], [0, 3, -1], [4, 5, 6], [0, 1, -1]], jnp.int32)
    count = (path >= 0).sum(1)
    verdict = Verdict(path, count, jnp.full((4,), 2), jnp.zeros(path.shape), jnp.full((4,), -1))
    state = drafter.commit({}, {}, None, state, None, tree, None, verdict)
    assert state.fed.tolist() == [12, 11, 10, 12]
    union = [PromptLookup(num_nodes=4), drafter]
    with pytest.raises(ValueError, match="OtherTokenizer spells at most 3 accepted tokens a step, but .* 4 deep"):
        EnsembleUnion(Members(tuple(union)))


@pytest.mark.slow
def test_a_row_without_room_is_decoded_plainly() -> None:
    done = contract.check_equals_autoregressive(made(expansion=0.25), Recursive, common.looping_requests())
    # Something was drafted in the room there was, and less than with more room.
    assert 0 < sum(c.accepted[1:].sum() for c in done) < sum(c.accepted[1:].sum() for c in completions())


def test_a_model_is_loaded_with_its_own_tokenizer(tmp_path) -> None:
    target, draft = tiny_target(width=16), tiny_target(layers=1, width=16, seed=1)
    # The same bytes, in another order and without the special tokens' names.
    tokens = ["<s>", "</s>", *sorted(draft.tokenizer.backend.get_vocab())[::-1][:256]]
    kept = [t for t in tokens[2:] if not t.startswith("<|")]
    backend = byte_level_bpe("gpt-2", ["<s>", "</s>", *kept], [CONTROL] * 2 + [NORMAL] * len(kept), [])
    other = dataclasses.replace(draft, tokenizer=Tokenizer(backend=backend, eos_ids=(1,)))
    save_target(other, tmp_path)
    found = DRAFTERS["other_tokenizer"](target, source=str(tmp_path), num_nodes=2)
    assert found.drafter.bos == -1, "this tokenizer begins a text with nothing"
    assert found.drafter.num_nodes == 2 and found.drafter.config.head_size == len(kept)
    t, d = int(found.tables["vocab"][7]), int(found.tables["draft_ids"][7])
    assert target.tokenizer.backend.id_to_token(t) == backend.id_to_token(d)
    head = np.asarray(other.params["lm_head"]["kernel"])[:, d]
    np.testing.assert_array_equal(np.asarray(found.params["lm_head"]["kernel"])[:, 7], head)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_nodes": 0}, "num_nodes=0; a draft model"),
        ({"expansion": 0.0}, "expansion=0.0; expected a number above 0"),
        ({"bos": 13}, "bos=13; expected one of the draft's 13 ids, or -1 for none"),
    ],
)
def test_out_of_range(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OtherTokenizer(common.config(1), **options)


def test_fresh_parameters_fit(tmp_path) -> None:
    drafter = OtherTokenizer(restrict_shapes(common.VOCAB), 2)
    params, tables = jax.eval_shape(
        lambda: drafter.init_params(
            jax.random.key(0), merge(graph(common.config())[0], init_decoder(common.config(), jax.random.key(0)))
        )
    )
    assert params["lm_head"]["kernel"].shape == (16, common.VOCAB) and tables["pieces"].shape == (common.VOCAB, 1)
