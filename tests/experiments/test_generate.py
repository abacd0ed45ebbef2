from __future__ import annotations

import dataclasses
import io
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from absl import flags
from rich.console import Console

from experiments import generate
from specjax import build, decoding
from specjax.decoding import Request, make_sampling


@pytest.fixture
def prompt(monkeypatch: pytest.MonkeyPatch):
    """Sets --prompt."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    return lambda text: monkeypatch.setattr(flags.FLAGS["prompt"], "value", text)


def shown(pieces: list[tuple[str, bool]], terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, color_system="standard" if terminal else None, width=20)
    for piece, drafted in pieces:
        generate.show(console, piece, drafted)
    return out.getvalue()


def test_drafted_text_is_green_on_a_terminal_and_plain_elsewhere() -> None:
    pieces = [("The ", False), ("sky is blue and wide", True), (".\n", False)]
    assert shown(pieces, terminal=False) == "The sky is blue and wide.\n"
    assert shown(pieces, terminal=True) == "The \x1b[32msky is blue and wide\x1b[0m.\n"


def test_what_a_model_writes_cannot_drive_the_terminal() -> None:
    assert shown([("a\x1b[2J\x07b\tc [bold]d[/bold]", False)], terminal=False) == "a[2Jb\tc [bold]d[/bold]"


def test_a_prompt_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("  piped text\n"))
    assert generate.read_prompt(None) == "piped text"
    assert generate.read_prompt("given") == "given"
    with pytest.raises(ValueError, match="the prompt is empty"):
        generate.read_prompt(" ")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\xfe"), encoding="utf-8"))
    with pytest.raises(ValueError, match="standard input is not UTF-8 text .*0xff in position 1"):
        generate.read_prompt(None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\udcff"))
    with pytest.raises(ValueError, match="standard input is no valid text: character 1"):
        generate.read_prompt(None)
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", terminal)
    with pytest.raises(ValueError, match="no prompt; give --prompt"):
        generate.read_prompt(None)


def test_the_answer_is_that_of_the_library_and_is_counted(
    tiny: Path, prompt, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt("Say hello.")
    options = {"target.source": f"{tiny}/target", "max_new_tokens": 30, "layout": "plain", "drafter.num_nodes": 2}
    config = build.load_config("configs/generate.py", f"{tiny}/draft", options)
    generate.main(config)
    captured = capsys.readouterr()

    target = build.target_from_config(config.target)
    drafting = build.drafter_from_config(config.drafter, target)
    loop, weights = build.make_loop(target, drafting, make_sampling([0.0]))
    request = Request(tuple(target.tokenizer.apply_chat([{"role": "user", "content": "Say hello."}])), 30)
    (done,) = decoding.generate(loop, weights, [request], context=target.context, vocab=target.config.vocab_size)
    text = target.tokenizer.decode([t for t in done.tokens if t not in target.eos_ids])
    clean = "".join(c for c in text if c.isprintable() or c in "\n\t")
    assert captured.out == clean + "\n"
    tau = f"tau {done.emitted / done.steps:.2f}"
    assert f"{len(done.tokens)} tokens with draft_model: {tau}, " in captured.err and "tokens/s" in captured.err

    tally = generate.Tally()
    pieces = list(generate.stream(loop, weights, request, target, 0, tally))
    assert "".join(piece for piece, _ in pieces) == text
    assert (tally.tokens, tally.steps, tally.emitted) == (len(done.tokens), done.steps, done.emitted)
    accepted = sum(i * n for i, n in enumerate(done.accepted.tolist()))
    drafted = sum(mark for _, mark in pieces)
    assert 0 < drafted <= accepted <= drafted + 1  # an end of sequence is accepted, but not shown
    stop = text[len(text) // 2 :][:2]
    tally = generate.Tally()
    cut = "".join(piece for piece, _ in generate.stream(loop, weights, request, target, 0, tally, (stop,)))
    assert stop and cut == text.split(stop)[0]
    # Counted up to the token that completes it, and nothing that the last step emitted behind it.
    counts = range(1, len(done.tokens) + 1)
    assert tally.tokens == next(n for n in counts if stop in target.tokenizer.decode(done.tokens[:n]))
    assert tally.emitted == tally.tokens - 1

    # Behind a token whose embedding is broken everything is NaN: what stands in front of it is shown and counted.
    end = next(i for i, t in enumerate(done.tokens) if i > 2 and t not in (*request.prompt, *done.tokens[:i]))
    embedding = weights.target["embed"]["embedding"].at[done.tokens[end]].set(jnp.nan)
    broken = dataclasses.replace(weights, target=weights.target | {"embed": {"embedding": embedding}})
    pieces, tally = [], generate.Tally()
    with pytest.raises(FloatingPointError, match=f"{end + 1} of output"):
        for piece, _ in generate.stream(loop, broken, request, target, 0, tally):
            pieces.append(piece)
    assert "".join(pieces) == target.tokenizer.decode(done.tokens[: end + 1]) and tally.tokens == end + 1


def test_settings_of_the_answer_are_checked_before_a_model_is_loaded(prompt) -> None:
    prompt("Say hello.")
    for option, message in [
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 in row 0; expected a number > 0"),
        ({"stop": ("a", "")}, "stop string 1 is ''; expected some text"),
        ({"logit_bias": ((7, float("inf")),)}, "logit_bias of token 7 is inf"),
        ({"rule_options": ("epsilon", 0.2)}, "rule_options=.* expected pairs"),
    ]:
        config = build.load_config("configs/generate.py", "plain", {"target.source": "nowhere", **option})
        with pytest.raises(ValueError, match=message):
            generate.main(config)
