"""How prompts are put to the model: template, turns, what fits its context."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from specjax.decoding import MAX_STOP_TOKENS, Completion, Request, check_requests
from specjax.decoding.generate import BUCKET
from specjax.evaluation.contenders import Info
from specjax.evaluation.prompts import Prompt
from specjax.models import Target
from specjax.models.tokenizer import check_unicode

TEMPLATES = ("chat", "plain")
SUFFIX = ".jinja"
LONG_PROMPTS = ("error", "skip")
# Tokens that a chat template may put around a turn, beyond those counted.
TURN_SLACK = 16

Message = dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asking:
    """How prompts are put to the model.

    Attributes:
        max_new_tokens: budget of every answer.
        system_prompt: the conversation's first message; None leaves it to the chat template.
        template: `chat`, the target's own; `plain`, the messages' text alone, line by line, which is not how a chat
            model was trained; the name of one that ships (`shipped_templates`); or the path of a Jinja file.
        long_prompts: what to do with a prompt whose first turn does not fit the context: `error`, or `skip` it.

    Raises:
        ValueError: a value is out of range.
    """

    max_new_tokens: int
    system_prompt: str | None = None
    template: str = "chat"
    long_prompts: str = "error"

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.max_new_tokens)
        if self.template not in TEMPLATES:
            template_text(self.template)
        if self.long_prompts not in LONG_PROMPTS:
            raise ValueError(f"long_prompts={self.long_prompts!r}; expected one of {', '.join(LONG_PROMPTS)}")


def check_count(name: str, value: Any) -> None:
    """Checks a setting that counts something.

    Raises:
        ValueError: it is no whole number, or less than 1.
    """
    if not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name}={value!r}; expected at least 1, a whole number")


def shipped_templates() -> tuple[str, ...]:
    """Names of the chat templates that ship, for targets whose tokenizers have none."""
    files = importlib.resources.files("specjax.evaluation").joinpath("data").iterdir()
    return tuple(sorted(file.name.removesuffix(SUFFIX) for file in files if file.name.endswith(SUFFIX)))


@functools.cache
def template_text(name: str) -> str:
    """The chat template of this name, or in the file at this path.

    Raises:
        ValueError: there is neither.
    """
    if name in shipped_templates():
        return importlib.resources.files("specjax.evaluation").joinpath("data", name + SUFFIX).read_text()
    if not epath.Path(name).is_file():
        known = ", ".join((*TEMPLATES, *shipped_templates()))
        raise ValueError(f"template={name!r}; expected one of {known}, or the path of a chat template's Jinja file")
    return epath.Path(name).read_text()


def as_messages(prompt: str | Sequence[Message]) -> list[Message]:
    """A user's turn as the conversation that it opens; a conversation as it is.

    Raises:
        ValueError: the prompt is neither, or holds no text, or what cannot be encoded.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, Sequence) or not all(_is_message(m) for m in messages):
        raise ValueError(
            f"the prompt is {prompt!r}; expected a text, or messages like {{'role': 'user', 'content': 'Hello'}}"
        )
    if not messages or not all(m["content"].strip() for m in messages):
        raise ValueError("the prompt is empty; expected some text")
    for message in messages:
        check_unicode(message["content"], "the prompt")
    return list(messages)


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def encode(target: Target, messages: Sequence[Message], template: str | None = None) -> tuple[int, ...]:
    """Ids of a conversation that the model is to go on with.

    Args:
        target: for its tokenizer.
        messages: oldest first.
        template: as in `Asking`; None for the target's own, and plain text where it has none.

    Raises:
        ValueError: `chat`, and the target has no template.
    """
    tokenizer = target.tokenizer
    if template == "plain" or (template is None and tokenizer.chat_template is None):
        return tuple(tokenizer.encode("\n".join(m["content"] for m in messages)))
    if template not in (None, "chat"):
        tokenizer = dataclasses.replace(tokenizer, chat_template=template_text(template))
    if tokenizer.chat_template is None:
        raise ValueError(
            "template='chat', but the target's tokenizer has no chat template: set template to "
            f"{', '.join(shipped_templates())} or the path of a Jinja file where it is a chat model, to plain where it "
            "is a base model"
        )
    return tuple(tokenizer.apply_chat(messages))


def stop_tokens(target: Target, stops: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The usual tokens of each stop string, for the loop; a longer one than it takes is left to the text search."""
    encoded = [tuple(target.tokenizer.encode(stop, add_special=False)) for stop in stops]
    return tuple(ids for ids in encoded if 1 <= len(ids) <= MAX_STOP_TOKENS)


def opening(asking: Asking) -> list[Message]:
    """What stands before the first turn."""
    return [{"role": "system", "content": asking.system_prompt}] if asking.system_prompt else []


class Conversation:
    """One prompt's turns, each continued with the model's own answers."""

    def __init__(self, target: Target, prompt: Prompt, index: int, info: Info, asking: Asking):
        """Starts before the first turn."""
        self._target, self._index, self._info, self._asking = target, index, info, asking
        self._left = list(prompt.turns)
        self._messages = opening(asking)

    def next_request(self) -> Request | None:
        """The next turn, or None when there is none left."""
        if not self._left:
            return None
        self._messages.append({"role": "user", "content": self._left.pop(0)})
        prompt = encode(self._target, self._messages, self._asking.template)
        return self._info.request(prompt, self._asking.max_new_tokens, self._index)

    def answer(self, completion: Completion) -> None:
        """Takes in the answer to the last request."""
        kept = [t for t in completion.tokens if t not in self._target.eos_ids]
        self._messages.append({"role": "assistant", "content": self._target.tokenizer.decode(kept)})


def fitting(target: Target, prompts: Sequence[Prompt], asking: Asking) -> tuple[tuple[Prompt, ...], tuple[str, ...]]:
    """The prompts whose first turn leaves room for a token in the target's context, and the ids of the others.

    Raises:
        ValueError: one does not fit and `long_prompts` is `error`, or no prompt of a category fits.
    """
    lengths = [len(_first_request(target, prompt, index, asking).prompt) for index, prompt in enumerate(prompts)]
    fits = [length < target.context for length in lengths]
    if asking.long_prompts == "error" and not all(fits):
        index = fits.index(False)
        raise ValueError(
            f"prompt {prompts[index].id!r} has {lengths[index]} tokens, but the model's context is {target.context}; "
            "shorten it, or set long_prompts='skip' to leave such prompts out and count them"
        )
    kept = tuple(prompt for prompt, fit in zip(prompts, fits, strict=True) if fit)
    empty = sorted({prompt.category for prompt in prompts} - {prompt.category for prompt in kept})
    if empty:
        raise ValueError(
            f"no prompt of category {empty[0]!r} fits the model's context of {target.context} tokens: all of it would "
            "be skipped; leave the category out, or take a target with a longer context"
        )
    return kept, tuple(prompt.id for prompt, fit in zip(prompts, fits, strict=True) if not fit)


def buffer_for(target: Target, prompts: Sequence[Prompt], asking: Asking, margin: int) -> int:
    """One token buffer for a whole run: the longest conversation with full answers, and `margin` tokens behind it.

    Raises:
        ValueError: a first turn does not fit the context; see `check_requests`.
    """
    first = [_first_request(target, prompt, index, asking) for index, prompt in enumerate(prompts)]
    check_requests(first, target.context, target.config.vocab_size)
    longest = 0
    for prompt in prompts:
        messages = opening(asking)
        for turn in prompt.turns[:-1]:
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": "."}]
        messages.append({"role": "user", "content": prompt.turns[-1]})
        extra = len(prompt.turns) * asking.max_new_tokens + (len(prompt.turns) - 1) * TURN_SLACK
        longest = max(longest, min(len(encode(target, messages, asking.template)) + extra, target.context))
    return -(-(longest + margin) // BUCKET) * BUCKET


def _first_request(target: Target, prompt: Prompt, index: int, asking: Asking) -> Request:
    request = Conversation(target, prompt, index, Info("", "", ""), asking).next_request()
    assert request is not None
    return request
