"""What stands for a tokenizer: a hash of what it does, whatever its tokenizer.json says it with.

One tokenizer has several spellings: the cut of digits as a class of its own or as a regex, merges as pairs or as lines.
What a drafter needs is that ids mean the same text, so the hash is of the vocabulary, of the merges, and of the ids
that the tokenizer gives to texts: `PROBES`, and the text of each of its tokens, which tells for every token whether the
cut before the merges lets it come about.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import tokenizers

# Part of every hash: a change of one character makes all recorded ones another's. Characters are of old versions of
# Unicode, on whose classes all libraries agree.
PROBES = (
    "",
    " ",
    "a",
    " a",
    "Hello world, it's 2026!",
    "0 12 345 6789 1234567890 3.14159 -1,000,000 1e-9 0xFF 2nd a1b2 12:30",
    "١٢٣٤ १२३ ½¾ ①② Ⅷ x²³",
    "  two   three    four     five\u00a0nbsp\u2003em\u3000wide  ",
    "\n\n\n a\n b\r\n\r\n\tc\t\t d \n \n  \n",
    "I'm you're he'd we'll they've can't it's 'tis o'clock l'été it\u2019s",
    "I'M YOU'RE HE'D WE'LL THEY'VE CAN'T IT'S",
    "CamelCase snake_case kebab-case UPPER e-mail@example.org https://example.org/a?b=c&d=%20#e C:\\dir\\file.txt",
    "!?.,;:… ()[]{}<> \"quoted\" 'single' «such» \u201ccurly\u201d \u2014 \u2013 * ** *** ### === --- ~~~",
    "$100 50% 5€ |x| ^ ` \\ /",
    'def f(x: int) -> str:\n    if x != 0 and not (x >> 2):\n\treturn f"{x:>8}"  # note\n',
    "/* c */ for(int i=0;i<n;++i){a[i]+=1;}\n\n\n        return a;\n",
    '{"key": [1, 2.5, null, true], "text": "a\\n\\u00e9"}\n<div class="x">&amp;</div>\n',
    "$\\frac{a}{b}$\n| a | b |\n|---|---|\n- [x] **done**\n",
    "Grüße aus Zürich, naïve café, Ångström, Łódź, İstanbul, piñata, cafe\u0301 A\u030a \ufb01n \u212b",
    "Привет, мир! Γειά σου Κόσμε Արև გამ",
    "漢字かな交じり文。カタカナー \uff21\uff22\uff11\uff12 你好\uff0c世界\uff01 안녕하세요",
    "שלום مرحبا بِسْم नमस्ते สวัสดี நன்றி",
    "😀🚀👍🏽 👩\u200d👩\u200d👧 ❤\ufe0f 🇩🇪 →≤≠∞∑ \U0001d49c \U00020000",
    "\x00\x01\x07\x08\x0b\x0c\x1b[0m\x7f\x85\u200b\u200e\u2028\u2029\ufeff\ufffd\ue000\U0010ffff",
    "a" * 1500,
    " " * 700 + "x" + "\n" * 300 + "=" * 300,
    "ab" * 400 + "9" * 400 + "é" * 200 + "漢" * 200,
)


def behaviour(backend: tokenizers.Tokenizer) -> str:
    """Sixteen hex digits for what a tokenizer does; about 0.4 s for 49,152 tokens."""
    content = json.loads(backend.to_str())
    if content["padding"] or content["truncation"]:
        backend = tokenizers.Tokenizer.from_str(backend.to_str())
        backend.no_padding()
        backend.no_truncation()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    probes = _encode(backend, PROBES)
    digest = hashlib.sha256()
    for part in (
        _model(content["model"], vocabulary),
        [_added(token, content["normalizer"] is not None) for token in content["added_tokens"]],
        probes,
        [backend.decode(found, skip_special_tokens=skip) for found in probes for skip in (False, True)],
        backend.encode("a", add_special_tokens=True).ids,
        backend.encode("a", "b", add_special_tokens=True).ids,
    ):
        digest.update(json.dumps(part, sort_keys=True).encode() + b"\n")
    for token_id in sorted(vocabulary.values()):
        text = backend.decode([token_id], skip_special_tokens=False)
        digest.update(json.dumps([text, *_encode(backend, [text])]).encode())
    return digest.hexdigest()[:16]


def spelling(backend: tokenizers.Tokenizer) -> str:
    """Sixteen hex digits for its tokenizer.json, which earlier versions recorded instead."""
    content = json.loads(backend.to_str())
    content.pop("padding", None), content.pop("truncation", None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _encode(backend: tokenizers.Tokenizer, texts: Iterable[str]) -> list[list[int]]:
    # One by one: encode_batch starts threads, after which the library warns of every fork.
    return [backend.encode(text, add_special_tokens=False).ids for text in texts]


def _model(model: dict[str, Any], vocabulary: dict[str, int]) -> Any:
    """Of a BPE the ids and merges, its switches being seen in what it does; of another kind everything."""
    if model["type"] != "BPE":
        return [model, vocabulary]
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    return ["BPE", vocabulary, merges]


def _added(token: dict[str, Any], normalizes: bool) -> dict[str, Any]:
    """`normalized` says nothing where there is no normalizer."""
    return {key: value for key, value in token.items() if normalizes or key != "normalized"}
