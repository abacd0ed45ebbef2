"""Answers one prompt as it is decoded, drafted tokens in colour.

    python -m experiments.generate --prompt="Explain why the sky is blue."
    echo "Explain why the sky is blue." | python -m experiments.generate

What the draft proposed and the target accepted is green on a terminal. Settings: configs/generate.py.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import ml_collections
from absl import flags
from rich.console import Console
from rich.text import Text

from experiments import _main
from specjax import build
from specjax.decoding import (
    Completion,
    Loop,
    Request,
    StopText,
    Weights,
    check_fault,
    check_requests,
    check_stop_strings,
    end_text,
    prefill,
    read_row,
    request_sampling,
)
from specjax.evaluation.conversations import encode, stop_tokens
from specjax.models import Target
from specjax.models.tokenizer import check_unicode
from specjax.parallel import on_mesh_of

flags.DEFINE_string("prompt", None, "the user's turn; standard input where it is not given")
DRAFTED = "green"


@dataclass
class Tally:
    """Counts and seconds of one answer."""

    tokens: int = 0
    steps: int = 0
    emitted: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


def main(config: ml_collections.ConfigDict) -> None:
    """Loads, compiles, streams, and says how fast it was."""
    console, notes = _main.console(), Console(stderr=True, highlight=False, quiet=jax.process_index() > 0)
    text = read_prompt(flags.FLAGS.prompt)
    if config.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={config.max_new_tokens}; expected at least 1")
    check_stop_strings(config.stop)
    # The prompt alone waits for the tokenizer; everything else is checked before a model is loaded.
    asked, rule_options = sampling_request(config), _main.pairs("rule_options", config.rule_options)
    sampling = request_sampling([asked])

    target = build.placed_target(config)
    drafting = build.drafter_from_config(config.drafter, target)
    loop, weights = build.make_loop(
        target,
        drafting,
        sampling,
        rule=config.rule or None,
        rule_options=rule_options,
        lossless=config.lossless,
        precision=config.precision,
        layout=config.layout,
    )
    system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    prompt = encode(target, [*system, {"role": "user", "content": text}])
    request = dataclasses.replace(asked, prompt=prompt, stop=stop_tokens(target, config.stop))
    check_requests([request], target.context, target.config.vocab_size)
    start = time.perf_counter()
    with notes.status("compiling (kept for the next time)"):
        warm_up(loop, weights, request, target, config.seed)
    compiled = time.perf_counter() - start

    tally = Tally()
    for piece, drafted in stream(loop, weights, request, target, config.seed, tally, config.stop):
        show(console, piece, drafted)
    console.print()
    seconds = tally.prefill_seconds + tally.decode_seconds
    tau = f"tau {tally.emitted / tally.steps:.2f}, " if tally.steps else ""
    notes.print(
        f"{tally.tokens} tokens with {drafting.name}: {tau}{tally.tokens / seconds:.1f} tokens/s",
        f"(prompt of {len(request.prompt)} tokens {tally.prefill_seconds:.2f} s,",
        f"the rest {tally.decode_seconds:.2f} s;",
        f"before that {compiled:.1f} s to compile, or to read what was compiled)",
        soft_wrap=True,
    )


def sampling_request(config: ml_collections.ConfigDict) -> Request:
    """What the config says about the answer, for a prompt that is still to come."""
    return Request(
        prompt=(),
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        logit_bias=_main.pairs("logit_bias", config.logit_bias),
        suppress_tokens=tuple(config.suppress_tokens),
    )


def read_prompt(given: str | None) -> str:
    """The flag's text, else standard input.

    Raises:
        ValueError: there is none, it is empty, or it is not UTF-8.
    """
    if given is None and sys.stdin.isatty():
        raise ValueError("no prompt; give --prompt='...' or pipe text to standard input")
    where = "standard input" if given is None else "--prompt"
    try:
        text = (sys.stdin.read() if given is None else given).strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text ({error}); expected a text") from error
    check_unicode(text, where)
    if not text:
        raise ValueError("the prompt is empty; expected some text")
    return text


def warm_up(loop: Loop, weights: Weights, request: Request, target: Target, seed: int) -> None:
    """Compiles both programs, so that the stream that follows is timed without it."""
    state = prefill(loop, weights, [request], context=target.context, seed=seed)
    with on_mesh_of(weights.target):
        jax.block_until_ready(loop.step(weights, state))


def stream(
    loop: Loop,
    weights: Weights,
    request: Request,
    target: Target,
    seed: int,
    tally: Tally,
    stops: Sequence[str] = (),
) -> Iterator[tuple[str, bool]]:
    """Yields `(text, whether it was drafted)` up to the first stop string, and counts in the tally what is up to it."""
    decoder, watch, seen, accepted = target.tokenizer.stream(), StopText(stops), 0, 0
    before: Completion | None = None
    start = time.perf_counter()
    state = jax.block_until_ready(prefill(loop, weights, [request], context=target.context, seed=seed))
    tally.prefill_seconds = time.perf_counter() - start
    start = time.perf_counter()
    for current in loop.stream(weights, state):
        row = read_row(current, 0)
        so_far = int((row.accepted * range(len(row.accepted))).sum())
        for i, token in enumerate(row.tokens[seen:]):
            if token not in target.eos_ids:
                yield watch.push(decoder.push(token)), i < so_far - accepted
            if watch.found:
                row = end_text(before, row, seen + i + 1)
                break
        before, seen, accepted = row, len(row.tokens), so_far
        tally.tokens, tally.steps, tally.emitted = len(row.tokens), row.steps, row.emitted
        if row.finish == "fault":
            yield watch.push(decoder.finish()) + watch.finish(), False
        check_fault(row, "the prompt")
        if watch.found:
            break
    tally.decode_seconds = time.perf_counter() - start
    yield watch.push(decoder.finish()) + watch.finish(), False


def show(console: Console, piece: str, drafted: bool) -> None:
    """Prints a piece at once; control characters that could drive the terminal are left out."""
    clean = "".join(c for c in piece if c.isprintable() or c in "\n\t")
    if console.is_terminal:
        console.print(Text(clean, style=DRAFTED if drafted else ""), end="", soft_wrap=True)
    else:
        console.file.write(clean)
    console.file.flush()


if __name__ == "__main__":
    _main.run(main, config="configs/generate.py")
