"""What all calls share: prompts as token ids, and the compiled program with its arrays as this machine wants them."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from specjax import build
from specjax.build import Drafting
from specjax.decoding import Loop, Sampling, Weights
from specjax.evaluation.conversations import Message, as_messages, encode
from specjax.models import Target, pack

_PACKED: weakref.WeakKeyDictionary[Target | Drafting, Any] = weakref.WeakKeyDictionary()


def several(prompts: str | Sequence[str]) -> list[str]:
    """The prompts as a list; what each of them is, `token_ids` looks at."""
    if not isinstance(prompts, str | Sequence):
        raise ValueError(f"prompts={prompts!r}; expected a text, or a list of them")
    return [prompts] if isinstance(prompts, str) else list(prompts)


def token_ids(target: Target, prompt: str | Sequence[Message]) -> tuple[int, ...]:
    """A user's turn (or a list of messages) through the chat template; plain text where the model has none."""
    if not isinstance(target, Target):
        raise ValueError(f"the target is {target!r}; expected what load_target returns")
    return encode(target, as_messages(prompt))


def token_options(logit_bias: Mapping[int, float] | None, suppress_tokens: Sequence[int]) -> dict[str, Any]:
    """Both as a `Request` takes them; `check_requests` and `make_sampling` look at the ids and numbers in them.

    Raises:
        ValueError: no mapping, or no ids.
    """
    if logit_bias is not None and not isinstance(logit_bias, Mapping):
        raise ValueError(f"logit_bias={logit_bias!r}; expected numbers by token id, as in {{17: -2.5}}, or None")
    try:
        never = tuple(suppress_tokens)
    except TypeError:
        raise ValueError(
            f"suppress_tokens={suppress_tokens!r}; expected token ids, as in (17, 18), or () for none"
        ) from None
    return {"logit_bias": dict(logit_bias or {}), "suppress_tokens": never}


def usual_layout(target: Target) -> str:
    """Of the weights: for few rows on a CPU they are packed."""
    return "packed" if jax.default_backend() == "cpu" and target.placement is None else "plain"


def make_program(
    target: Target,
    drafting: Drafting,
    sampling: Sampling,
    *,
    rule: str | None = None,
    rule_options: Mapping[str, Any] | None = None,
    lossless: bool = True,
    layout: str | None = None,
    precision: str = "float32",
) -> tuple[Loop, Weights]:
    """The loop and its arrays, laid out once for each loaded model.

    Args:
        target: what to decode with.
        drafting: how to draft.
        sampling: the rows' parameters; only its statics matter here.
        rule: registered name, or None for the default.
        rule_options: of the rule.
        lossless: refuse a rule that changes the output law.
        layout: `packed` or `plain`; None for the usual one.
        precision: of matrix products, `float32` or `default`.

    Raises:
        ValueError: what is no drafter, an unknown layout or precision, or a rule that does not fit.
    """
    if not isinstance(drafting, Drafting):
        raise ValueError(f"the drafter is {drafting!r}; expected what load_drafter returns")
    layout = layout or usual_layout(target)
    build.check_layout(layout, target)
    options: dict[str, Any] = {"rule_options": rule_options, "lossless": lossless, "precision": precision}
    loop, weights = build.make_loop(target, drafting, sampling, rule=rule, **options)
    if layout == "plain":
        return loop, weights
    return loop, dataclasses.replace(weights, target=_packed(target), drafter=_packed(drafting))


def _packed(owner: Target | Drafting) -> Any:
    """Parameters laid out for a few rows on a CPU, once for each loaded model."""
    if owner not in _PACKED:
        _PACKED[owner] = pack(owner.params)
    return _PACKED[owner]
