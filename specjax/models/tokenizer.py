"""Tokenizers: text to ids and back, chat templates, and text that streams one token at a time."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import tokenizers
from etils import epath
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specjax.models import fingerprint
from specjax.models.json_files import read_object, read_text

Message = Mapping[str, Any]

_REPLACEMENT = "\ufffd"


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A `tokenizers.Tokenizer` with what a chat model needs around it.

    Attributes:
        backend: the tokenizer proper.
        eos_ids: ids that end a text, in the order the model declares them.
        bos_id: id that begins a text, None where the model has none.
        pad_id: id for padding, None where the model has none.
        chat_template: Jinja template of a conversation, None for a base model.
    """

    backend: tokenizers.Tokenizer
    eos_ids: tuple[int, ...]
    bos_id: int | None = None
    pad_id: int | None = None
    chat_template: str | None = None

    @property
    def vocab_size(self) -> int:
        """Number of ids that stand for something; a model's embedding may have more rows."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of `text`; with `add_special`, with the tokens that the model expects around it (often a BOS).

        Raises:
            ValueError: the text holds half of a surrogate pair, as bytes that are no UTF-8 are often read.
        """
        check_unicode(text)
        return self.backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`, without special tokens unless asked for."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The conversation as the text that the model was trained on.

        Args:
            messages: dicts with `role` and `content`, oldest first.
            add_generation_prompt: end with the opening of the assistant's turn.

        Raises:
            ValueError: the model has no template, or the template refuses these messages.
        """
        if not messages:
            raise ValueError("the conversation is empty: give at least one message with role and content")
        if self.chat_template is None:
            raise ValueError(
                "this tokenizer has no chat template: it belongs to a base model. Use encode(text), "
                "or put the template in chat_template.jinja beside tokenizer.json"
            )
        special = {"bos_token": self._token(self.bos_id), "pad_token": self._token(self.pad_id)}
        special["eos_token"] = self._token(self.eos_ids[0] if self.eos_ids else None)
        try:
            return _compile(self.chat_template).render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **{name: token for name, token in special.items() if token is not None},
            )
        except (jinja2.TemplateError, TypeError) as error:
            roles = [message.get("role") for message in messages]
            raise ValueError(f"the chat template refused messages with roles {roles}: {error}") from error

    def apply_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation. The template writes its own special tokens; none are added to them."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special=False)

    def stream(self) -> StreamDecoder:
        """A fresh decoder for one text that grows token by token."""
        return StreamDecoder(self)

    def fingerprint(self) -> str:
        """Hash of the map from text to ids and back: equal for tokenizers that are interchangeable.

        The chat template and the end-of-text ids are no part of it, nor is how tokenizer.json is written.
        """
        return self._fingerprint

    def fingerprint_as(self, recorded: object) -> str:
        """The fingerprint in the form of one that was recorded, to compare it with.

        Earlier versions recorded a hash of tokenizer.json. Where `recorded` is that of this very tokenizer, it is given
        back; in every other case `fingerprint()`.
        """
        if recorded != self._fingerprint and recorded == self._spelling:
            return self._spelling
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        return fingerprint.behaviour(self.backend)

    @functools.cached_property
    def _spelling(self) -> str:
        return fingerprint.spelling(self.backend)

    def _token(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.backend.id_to_token(token_id)

    @classmethod
    def from_directory(cls, directory: epath.PathLike) -> Tokenizer:
        """Reads the tokenizer of a Hugging Face model directory.

        Raises:
            FileNotFoundError: there is no `tokenizer.json`.
            ValueError: a file is damaged, or no end-of-text id is declared anywhere.
        """
        directory = epath.Path(directory)
        if not (directory / "tokenizer.json").exists():
            raise FileNotFoundError(
                f"{directory} has no tokenizer.json: save one there with transformers "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(directory))"
            )
        try:
            backend = tokenizers.Tokenizer.from_str((directory / "tokenizer.json").read_text())
        except Exception as error:  # The Rust side raises bare Exception.
            raise ValueError(f"{directory / 'tokenizer.json'} is not a tokenizer: {error}") from error
        backend.no_padding()
        backend.no_truncation()
        settings: dict[str, Any] = {}
        ids: dict[str, int | None] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            found = _optional(directory / name)
            settings |= found
            for kind in ("bos", "eos", "pad"):
                if f"{kind}_token" in found:
                    ids[kind] = _special_id(backend, found[f"{kind}_token"], f"{directory / name}: {kind}_token")
        return cls(
            backend=backend,
            eos_ids=_eos_ids(directory, ids.get("eos"), max(backend.get_vocab().values(), default=-1) + 1),
            bos_id=ids.get("bos"),
            pad_id=ids.get("pad"),
            chat_template=_chat_template(directory, settings.get("chat_template")),
        )

    def save(self, directory: epath.PathLike) -> None:
        """Writes tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json."""
        directory = epath.Path(directory)
        (directory / "tokenizer.json").write_text(self.backend.to_str(pretty=False))
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "bos_token": self._token(self.bos_id),
            "eos_token": self._token(self.eos_ids[0] if self.eos_ids else None),
            "pad_token": self._token(self.pad_id),
        }
        settings = {name: value for name, value in settings.items() if value is not None}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        if self.chat_template is not None:
            (directory / "chat_template.jinja").write_text(self.chat_template)
        generation = {"bos_token_id": self.bos_id, "pad_token_id": self.pad_id}
        generation = {name: value for name, value in generation.items() if value is not None}
        eos = list(self.eos_ids) if len(self.eos_ids) != 1 else self.eos_ids[0]
        text = json.dumps(generation | {"eos_token_id": eos}, indent=2)
        (directory / "generation_config.json").write_text(text + "\n")


def check_unicode(text: str, what: str = "the text") -> None:
    """Checks that a text can be encoded.

    Raises:
        ValueError: it cannot; names the character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} is no valid text: character {error.start} is {text[error.start]!r}, half of a surrogate pair, as "
            "bytes are read that are not UTF-8; expected Unicode text"
        ) from error


class StreamDecoder:
    """Turns ids into text as they come; the pieces joined are `decode` of all ids.

    Bytes of an unfinished character are held back until the ids that finish it arrive.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # Text before `_shown` is out. Decoding restarts at `_from`, an earlier token, because some
        # tokenizers treat the first token of a text differently.
        self._ids: list[int] = []
        self._from = self._shown = 0

    def push(self, token_id: int) -> str:
        """The text that this id completes, often a word, sometimes nothing."""
        self._ids.append(int(token_id))
        return self._advance(final=False)

    def finish(self) -> str:
        """What is still held back, with unfinished characters replaced."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        out = self._tokenizer.decode(self._ids[self._from : self._shown])
        text = self._tokenizer.decode(self._ids[self._from :])
        if not final and (text.endswith(_REPLACEMENT) or len(text) <= len(out)):
            return ""
        self._from, self._shown = self._shown, len(self._ids)
        return text[len(out) :]


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the assistant's text, is written as it stands."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    """The template in a sandbox, with the conventions of Hugging Face chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        import datetime

        return datetime.datetime.now().strftime(form)

    def tojson(value: Any, indent: int | None = None) -> str:
        # Jinja's own filter escapes HTML, which models were not trained on.
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    environment.filters["tojson"] = tojson
    return environment.from_string(template)


def _optional(path: epath.Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no file."""
    return read_object(path) if path.exists() else {}


def _special_id(backend: tokenizers.Tokenizer, token: Any, where: str) -> int | None:
    content = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(content, str | None):
        raise ValueError(f"{where} is {token!r}; expected a token's text, or an object with its content")
    return None if content is None else backend.token_to_id(content)


def _eos_ids(directory: epath.Path, declared: int | None, known: int) -> tuple[int, ...]:
    """From the generation config, else the model's config, else the tokenizer's own token.

    Args:
        directory: of the model.
        declared: the tokenizer's own.
        known: ids that the tokenizer has; the model may have more.
    """
    files = [(directory / name, _optional(directory / name)) for name in ("generation_config.json", "config.json")]
    rows = files[1][1].get("vocab_size")
    limit = max(known, rows) if isinstance(rows, int) else known
    for path, content in files:
        value = content.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for found in ids:
            if isinstance(found, bool) or not isinstance(found, int):
                raise ValueError(f"{path}: eos_token_id is {value!r}; expected a token id, or a list of them")
            if not 0 <= found < limit:
                raise ValueError(
                    f"{path}: eos_token_id {found} lies outside the vocabulary of {limit} tokens, so no text would "
                    f"end; expected 0 to {limit - 1}"
                )
        if ids:  # An empty list says nothing.
            return tuple(ids)
    if declared is None:
        raise ValueError(
            f"no end-of-text id in {directory}: set eos_token_id in generation_config.json (one id or a list)"
        )
    return (declared,)


def _chat_template(directory: epath.Path, setting: Any) -> str | None:
    """A file of its own wins; a list of named templates gives its `default`."""
    if (directory / "chat_template.jinja").exists():
        return read_text(directory / "chat_template.jinja")
    if isinstance(setting, list) and all(isinstance(e, dict) and {"name", "template"} <= e.keys() for e in setting):
        named = {entry["name"]: entry["template"] for entry in setting}
        if "default" not in named:
            raise ValueError(f"{directory} has chat templates {sorted(named)}, none of them named default")
        setting = named["default"]
    if not isinstance(setting, str | None):
        raise ValueError(
            f"{directory / 'tokenizer_config.json'}: chat_template is {type(setting).__name__}; expected text, or a "
            "list of objects with name and template"
        )
    return setting
