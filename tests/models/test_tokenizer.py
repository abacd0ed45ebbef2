"""Tokenizers: chat templates as Hugging Face renders them, and text that streams without tearing characters."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
from pathlib import Path

import pytest
import transformers

from specjax.checkpoints.vocabularies import byte_level_bpe
from specjax.models.tokenizer import Tokenizer
from tests.models import tiny

TEXTS = (
    "Hello world, it's 2026!",
    "  leading and   inner  spaces \n\n\t tabs \r\n",
    "Grüße aus Zürich – 漢字かな交じり文 🤖👩‍👩‍👧 € ½ ①",
    "def f(x):\n    return x ** 2  # 12345 67.89\n",
    "'Tis WE'LL we'll DON'T don't",
    "<|end|> in the middle<|start|>and again",
    "",
)


def released(name: str, data_dir: Path) -> dict:
    """A published vocabulary: pre, tokens, merges, token_type, chat_template."""
    with gzip.open(data_dir / "tokenizers" / f"{name}.tokenizer.json.gz", "rt") as stream:
        return json.load(stream)


def test_decode_undoes_encode() -> None:
    tokenizer = tiny.tokenizer()
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_join_to_the_text(text: str) -> None:
    """Bytes one at a time: every character of several bytes is held back until it is whole."""
    tokenizer = tiny.tokenizer()
    ids, stream = tokenizer.encode(text), tokenizer.stream()
    pieces = [stream.push(i) for i in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)


def test_streams_of_random_bytes_join_to_what_decode_gives() -> None:
    tokenizer, rng = tiny.tokenizer(), random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(len(tiny.SPECIAL) + 256) for _ in range(rng.randrange(1, 30))]
        stream = tokenizer.stream()
        streamed = "".join(stream.push(i) for i in ids) + stream.finish()
        assert streamed == tokenizer.decode(ids)


def test_an_unfinished_character_comes_out_replaced_at_the_end() -> None:
    tokenizer = tiny.tokenizer()
    ids = tokenizer.encode("a€")[:-1]
    stream = tokenizer.stream()
    assert [stream.push(i) for i in ids] == ["a", "", ""]
    assert stream.finish() == "\ufffd"


def test_special_tokens_do_not_show_in_a_stream() -> None:
    tokenizer = tiny.tokenizer()
    stream = tokenizer.stream()
    assert [stream.push(i) for i in tokenizer.encode("a<|end|>b")] == ["a", "", "b"]


def test_conversations_are_rendered_as_transformers_renders_them(tmp_path: Path) -> None:
    """With every convention that templates lean on."""
    template = """
    {%- for message in messages %}
        {%- if message.role == 'tool' %}{% continue %}{% endif %}
        {{- bos_token if loop.first }}{% generation %}<|start|>{{ message.role }}
{{ message.content | trim }}{{ eos_token }}{% endgeneration %}
        {%- if message.extra is defined %}{{ message.extra | tojson }}{% endif %}
        {%- if loop.last and add_generation_prompt %}<|start|>assistant
        {% endif %}
    {%- endfor %}"""
    tokenizer = dataclasses.replace(tiny.tokenizer(), chat_template=template)
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": "<b>2 < 3?</b> \u20ac", "extra": {"a": ["<&'\u20ac", 1]}},
        {"role": "tool", "content": "skipped"},
        {"role": "assistant", "content": "Yes."},
    ]
    for prompt in (False, True):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert tokenizer.render_chat(messages, add_generation_prompt=prompt) == expected
        ids = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        assert tokenizer.apply_chat(messages, prompt) == ids


def test_templates_cannot_reach_python() -> None:
    tokenizer = dataclasses.replace(
        tiny.tokenizer(), chat_template="{{ messages.__class__.__base__.__subclasses__() }}{{ messages.append(1) }}"
    )
    with pytest.raises(ValueError, match="chat template refused messages with roles \\['user'\\]"):
        tokenizer.apply_chat([{"role": "user", "content": "x"}])


def test_a_refusal_by_the_template_is_one_clear_error() -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    tokenizer = dataclasses.replace(tiny.tokenizer(), chat_template=template)
    with pytest.raises(ValueError, match="roles \\['system'\\]: no system turns"):
        tokenizer.apply_chat([{"role": "system", "content": "x"}])
    assert tokenizer.apply_chat([{"role": "user", "content": "x"}]) == []


def test_a_base_model_has_no_chat() -> None:
    tokenizer = dataclasses.replace(tiny.tokenizer(), chat_template=None)
    with pytest.raises(ValueError, match="no chat template.*base model"):
        tokenizer.apply_chat([{"role": "user", "content": "x"}])
    with pytest.raises(ValueError, match="conversation is empty"):
        tiny.tokenizer().apply_chat([])


def test_fingerprints_tell_vocabularies_apart() -> None:
    one = tiny.tokenizer()
    assert one.fingerprint() == tiny.tokenizer().fingerprint()
    assert one.fingerprint() == dataclasses.replace(one, chat_template=None, eos_ids=(1, 2)).fingerprint()
    tokens = [one.backend.id_to_token(i) for i in range(one.vocab_size)]
    tokens[10], tokens[11] = tokens[11], tokens[10]
    other = dataclasses.replace(one, backend=byte_level_bpe("gpt-2", tokens, [1] * len(tokens), []))
    assert one.fingerprint() != other.fingerprint()


def test_the_vocabulary_ends_where_the_tokens_end() -> None:
    """A model's embedding may be padded beyond it: the tiny models have 264 rows for 259 tokens."""
    assert tiny.tokenizer().vocab_size == 259 < tiny.VOCAB


def test_directories_are_read_back_as_written(tmp_path: Path) -> None:
    written = dataclasses.replace(tiny.tokenizer(), eos_ids=(0, 2))
    written.save(tmp_path)
    read = Tokenizer.from_directory(str(tmp_path))
    for field in ("eos_ids", "bos_id", "pad_id", "chat_template"):
        assert getattr(read, field) == getattr(written, field)
    assert read.fingerprint() == written.fingerprint()


def test_eos_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    tiny.tokenizer().save(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert Tokenizer.from_directory(str(tmp_path)).eos_ids == (5, 7)
    (tmp_path / "generation_config.json").unlink()
    assert Tokenizer.from_directory(str(tmp_path)).eos_ids == (2,)
    (tmp_path / "config.json").unlink()
    assert Tokenizer.from_directory(str(tmp_path)).eos_ids == (0,)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="set eos_token_id in generation_config.json"):
        Tokenizer.from_directory(str(tmp_path))


def test_older_ways_to_keep_a_chat_template(tmp_path: Path) -> None:
    tiny.tokenizer().save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    settings = {"eos_token": {"content": "<|end|>", "lstrip": False}, "chat_template": "plain"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").unlink()
    read = Tokenizer.from_directory(str(tmp_path))
    assert (read.chat_template, read.eos_ids) == ("plain", (0,))
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": named}))
    assert Tokenizer.from_directory(str(tmp_path)).chat_template == "d"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": named[:1]}))
    with pytest.raises(ValueError, match="none of them named default"):
        Tokenizer.from_directory(str(tmp_path))


def test_damaged_directories(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no tokenizer.json"):
        Tokenizer.from_directory(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer"):
        Tokenizer.from_directory(str(tmp_path))


def test_an_unknown_pre_tokenizer_names_the_known() -> None:
    with pytest.raises(ValueError, match="'tekken' is not supported; expected smollm, qwen2, llama-bpe, gpt-2"):
        byte_level_bpe("tekken", ["a"], [1], [])


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["I", "'LL", "Ġpay", "Ġ", "123", "456", "7", "ĠCZK", "!!ĊĊ", "Ġ", "Ġok"]),
        ("qwen2", ["I", "'LL", "Ġpay", "Ġ", *"1234567", "ĠCZK", "!!ĊĊ", "Ġ", "Ġok"]),
        ("gpt-2", ["I", "'", "LL", "Ġpay", "Ġ1234567", "ĠCZK", "!!", "ĊĊĠ", "Ġok"]),
        ("smollm", ["I", "'", "LL", "Ġpay", "Ġ", *"1234567", "ĠCZK", "!!", "ĊĊĠ", "Ġok"]),
        ("default", ["I", "'", "LL", "Ġpay", "Ġ", "123", "456", "7", "ĠCZK", "!!", "ĊĊĠ", "Ġok"]),
    ],
)
def test_how_text_is_cut_before_merging(pre: str, pieces: list[str]) -> None:
    backend = byte_level_bpe(pre, ["a"], [1], [])
    cut = backend.pre_tokenizer.pre_tokenize_str("I'LL pay 1234567 CZK!!\n\n  ok")
    assert [piece for piece, _ in cut] == pieces


def test_gpt2_vocabulary_gives_the_known_ids(data_dir: Path) -> None:
    vocabulary = json.loads((data_dir / "tokenizers" / "gpt2.encoder.json").read_text())
    merges = (data_dir / "tokenizers" / "gpt2.vocab.bpe").read_text().splitlines()[1:]
    tokens = sorted(vocabulary, key=vocabulary.get)
    backend = byte_level_bpe("gpt-2", tokens, [1] * len(tokens), [m for m in merges if m])
    assert backend.encode("Hello world").ids == [15496, 995]
    assert backend.encode(" 12345 it's").ids == [17031, 2231, 340, 338]


@pytest.mark.parametrize(("name", "pre"), [("smollm2", "smollm"), ("qwen2.5", "qwen2")])
def test_published_vocabularies_cut_text_as_transformers_does(name: str, pre: str, data_dir: Path) -> None:
    """Against tokenizers put together from transformers' own pieces for these models."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    content = released(name, data_dir)
    assert content["pre"] == pre
    ours = byte_level_bpe(pre, content["tokens"], content["token_type"], content["merges"])
    vocabulary = {token: i for i, token in enumerate(content["tokens"])}
    theirs = Tokenizer(models.BPE(vocabulary, [tuple(m.split(" ")) for m in content["merges"]]))
    if pre == "smollm":
        cut = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

        theirs.normalizer = normalizers.NFC()
        whole = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
        cut = [whole, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    theirs.pre_tokenizer = pre_tokenizers.Sequence(cut)
    texts = [text for text in TEXTS if "<|" not in text]
    texts.append((data_dir / "text" / "wikitext2_valid.txt").read_text()[:20000])
    texts += [line for line in (data_dir / "gsm8k" / "test.jsonl").read_text().splitlines()[:20]]
    texts += ["e\u0301 combining", "1234567 ١٢٣ Ⅷ", "   \n  x", "\u3000wide"]
    for text in texts:
        assert ours.encode(text).ids == theirs.encode(text).ids, text[:80]
        expected = text if pre == "smollm" else normalizers.NFC().normalize_str(text)
        assert ours.decode(ours.encode(text).ids) == expected


def test_answers_of_the_demo_model_are_canonical_text(data_dir: Path) -> None:
    """What the model wrote decodes and encodes to the ids it wrote, but for rare non-canonical choices."""
    content = released("smollm2", data_dir)
    tokenizer = Tokenizer(
        backend=byte_level_bpe("smollm", content["tokens"], content["token_type"], content["merges"]), eos_ids=(2,)
    )
    same = total = 0
    with gzip.open(data_dir / "target_text" / "smollm2-135m-instruct.validation.jsonl.gz", "rt") as stream:
        for row in map(json.loads, stream):
            ids = [i for i in row["response_ids"] if i != 2]
            assert tokenizer.decode(ids) == row["response"].removesuffix("<|im_end|>")
            if row["temperature"] == 0:
                same += tokenizer.encode(tokenizer.decode(ids)) == ids
                total += 1
    assert same / total > 0.95
