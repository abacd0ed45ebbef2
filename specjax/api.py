"""The few calls that most users need; everything else is in the packages."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from specjax import build, checkpoints, decoding
from specjax.build import Drafting
from specjax.checkpoints import drafters
from specjax.decoding import Completion, Request, make_sampling
from specjax.models import Target, pack

_PACKED: weakref.WeakKeyDictionary[Target | Drafting, Any] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Result:
    """One completed prompt.

    Attributes:
        text: the answer, without the end-of-sequence token.
        completion: tokens, finish reason and counts.
    """

    text: str
    completion: Completion

    @property
    def tau(self) -> float:
        """Tokens per target pass, bonus included; NaN when the prefill's token ended the text."""
        c = self.completion
        return c.emitted / c.steps if c.steps else float("nan")


def load_target(source: str, *, dtype: str = "float32") -> Target:
    """Loads a model: see `specjax.checkpoints.load_target`."""
    return checkpoints.load_target(source, dtype=dtype)


def load_drafter(name: str, target: Target, **options: Any) -> Drafting:
    """A drafting method by registry name (`prompt_lookup`), or a trained drafter by zoo name, path or run directory.

    Args:
        name: what to load.
        target: what it drafts for.
        **options: of the method, `num_nodes` for instance.
    """
    if name not in build.DRAFTERS and ":" not in name and drafters.is_drafter(name):
        return build.make_drafter("draft_model", target, source=name, **options)
    return build.make_drafter(name, target, **options)


def encode_chat(target: Target, prompt: str | Sequence[dict[str, str]], system_prompt: str | None = None) -> list[int]:
    """A user's turn (or a list of messages) through the chat template; plain text where the model has none."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if not messages or not all(m["content"].strip() for m in messages):
        raise ValueError("the prompt is empty; expected some text")
    if target.tokenizer.chat_template is None:
        return target.tokenizer.encode("\n".join(m["content"] for m in messages))
    if system_prompt is not None:
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return target.tokenizer.apply_chat(messages)


def generate(
    target: Target,
    drafting: Drafting,
    prompts: str | Sequence[str],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    rule: str | None = None,
    batch: int = 1,
) -> Any:
    """Answers one prompt (a `Result`) or several (a list of them), through the chat template.

    Args:
        target: the model whose law the output has.
        drafting: how to draft.
        prompts: user turns.
        max_new_tokens: budget of each.
        temperature: 0 for greedy.
        top_k: 0 for all.
        top_p: in (0, 1].
        min_p: in [0, 1).
        seed: with the prompt's index, fixes every random choice.
        rule: verification rule; the exact one that fits best by default.
        batch: prompts that run together.
    """
    several = [prompts] if isinstance(prompts, str) else list(prompts)
    requests = [
        Request(tuple(encode_chat(target, p)), max_new_tokens, temperature, top_k, top_p, min_p, id=i)
        for i, p in enumerate(several)
    ]
    loop, weights = _loop(target, drafting, requests, rule)
    done = decoding.generate(
        loop, weights, requests, context=target.context, vocab=target.config.vocab_size, seed=seed, batch=batch
    )
    results = [Result(_text(target, c), c) for c in done]
    return results[0] if isinstance(prompts, str) else results


def stream(
    target: Target,
    drafting: Drafting,
    prompt: str | Sequence[dict[str, str]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    rule: str | None = None,
) -> Iterator[tuple[str, bool]]:
    """Yields `(piece of text, whether it was drafted)` as steps are taken, over the same compiled step."""
    request = Request(tuple(encode_chat(target, prompt)), max_new_tokens, temperature, top_k, top_p, min_p)
    loop, weights = _loop(target, drafting, [request], rule)
    decoder = target.tokenizer.stream()
    for tokens, drafted in decoding.stream(
        loop, weights, request, context=target.context, vocab=target.config.vocab_size, seed=seed
    ):
        for i, token in enumerate(tokens):
            if token not in target.eos_ids:
                yield decoder.push(token), i < drafted
    yield decoder.finish(), False


def _loop(
    target: Target, drafting: Drafting, requests: Sequence[Request], rule: str | None
) -> tuple[decoding.Loop, decoding.Weights]:
    decoding.check_requests(requests, target.context, target.config.vocab_size)
    sampling = make_sampling(
        [r.temperature for r in requests],
        [r.top_k for r in requests],
        [r.top_p for r in requests],
        [r.min_p for r in requests],
    )
    loop, weights = build.make_loop(target, drafting, sampling, rule=rule)
    if jax.default_backend() != "cpu":
        return loop, weights
    return loop, dataclasses.replace(weights, target=_packed(target), drafter=_packed(drafting))


def _packed(owner: Target | Drafting) -> Any:
    """Parameters laid out for a few rows on a CPU, once for each loaded model."""
    if owner not in _PACKED:
        _PACKED[owner] = pack(owner.params)
    return _PACKED[owner]


def _text(target: Target, completion: Completion) -> str:
    return target.tokenizer.decode([t for t in completion.tokens if t not in target.eos_ids])
