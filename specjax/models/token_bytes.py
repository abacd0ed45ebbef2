"""The bytes that tokens stand for, whatever alphabet a tokenizer writes them in, and bytes as tokens."""

from __future__ import annotations

import functools
import json
import re

from specjax.models.tokenizer import Tokenizer

SPACE = "\u2581"  # how SentencePiece writes one
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@functools.cache
def byte_alphabet() -> dict[int, str]:
    """The printable character that byte-level BPE writes each byte as (Radford et al. 2019, GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


class Spelling:
    """A tokenizer seen as bytes. Special tokens stand for none; they are known by their name.

    Attributes:
        bytes_of: bytes of every token that is not special, by id.
        specials: name of every special token, by id.
        single_bytes: ids of the tokens that stand in for one byte where nothing else fits (SentencePiece).
    """

    def __init__(self, tokenizer: Tokenizer):
        """Reads the vocabulary.

        Raises:
            ValueError: the tokenizer writes its tokens neither in byte-level BPE's nor in SentencePiece's alphabet.
        """
        self._backend = tokenizer.backend
        self._vocabulary = self._backend.get_vocab(with_added_tokens=False)
        decoder = self._backend.decoder
        steps = "" if decoder is None else json.dumps(json.loads(decoder.__getstate__()))
        self._byte_level = "ByteLevel" in steps
        if not self._byte_level and "ByteFallback" not in steps:
            raise ValueError(
                f"a tokenizer whose decoder is {steps or None} writes its tokens in no alphabet that is known here; "
                "expected byte-level BPE, or SentencePiece with byte fallback"
            )
        added = self._backend.get_added_tokens_decoder()
        self.specials = {i: token.content for i, token in added.items() if token.special}
        self.single_bytes = {
            i for token, i in self._vocabulary.items() if not self._byte_level and _BYTE.fullmatch(token)
        }
        letters = {letter: byte for byte, letter in byte_alphabet().items()}
        self.bytes_of: dict[int, bytes] = {}
        for token, i in self._vocabulary.items():
            if i in added:
                continue
            if not self._byte_level:
                single = _BYTE.fullmatch(token)
                self.bytes_of[i] = bytes([int(single[1], 16)]) if single else token.replace(SPACE, " ").encode()
            elif all(letter in letters for letter in token):
                self.bytes_of[i] = bytes(letters[letter] for letter in token)
        self.bytes_of |= {i: token.content.encode() for i, token in added.items() if not token.special}

    def spell(self, data: bytes) -> list[int]:
        """The ids that the tokenizer writes these bytes with, as one piece, without regard to what stands around them.

        Bytes that are in no token are left out.
        """
        if self._byte_level:
            alphabet = byte_alphabet()
            return [token.id for token in self._backend.model.tokenize("".join(alphabet[byte] for byte in data))]
        try:
            text = data.decode()
        except UnicodeDecodeError:  # a part of a character
            names = [f"<0x{byte:02X}>" for byte in data]
            return [self._vocabulary[name] for name in names if name in self._vocabulary]
        return [token.id for token in self._backend.model.tokenize(text.replace(" ", SPACE))]
