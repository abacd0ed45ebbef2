"""Order, warmth and bookkeeping of a measurement; the numbers made of it are tested in test_rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Completion, Request
from specjax.evaluation.benchmark import Settings, filled, measure
from specjax.evaluation.contenders import Info, LoopContender, Preparation, Timed
from specjax.evaluation.conversations import Conversation, buffer_for, encode, fitting
from specjax.evaluation.prompts import Prompt
from specjax.models import Target

PROMPTS = (
    Prompt("a", "writing", ("Say hello.",)),
    Prompt("b", "multi_turn", ("Name a colour.", "Name another.")),
)
SETTINGS = Settings(max_new_tokens=12, repeats=2)


@dataclass
class Scripted:
    """A peer that answers the same token, and says when it was asked."""

    info: Info
    log: list[tuple[str, int]]
    tokens: tuple[int, ...] = (7, 7, 7)
    prepared: list[int] = field(default_factory=list)
    compiles: bool = False

    def prepare(self, request: Request, buffer: int) -> Preparation:
        self.prepared.append(buffer)
        return Preparation(compile_seconds=1.5)

    def complete(self, request: Request) -> Timed:
        self.log.append((self.info.label, request.id))
        if self.compiles:

            def run(x: jax.Array) -> jax.Array:  # the name of the loop's program
                return x + len(self.log)

            jax.jit(run)(jnp.ones((len(self.log) + 1,)))
        counts = np.array([len(self.tokens) - 1]), np.zeros(0), np.zeros(0)
        steps = len(self.tokens) - 1
        done = Completion(self.tokens, "length", steps, steps, *counts, prompt_length=len(request.prompt))
        return Timed(done, 0.5, 1.0)


def scripted(log: list[tuple[str, int]], label: str, **options) -> Scripted:
    return Scripted(Info(label, label, "greedy"), log, **options)


def test_every_prompt_is_measured_by_all_in_turn(trio: list[LoopContender], target: Target) -> None:
    log: list[tuple[str, int]] = []
    peers = [scripted(log, "one"), scripted(log, "two")]
    told: list[tuple[str, int, int]] = []
    found = measure([trio[0], *peers], PROMPTS, target, SETTINGS, lambda *a: told.append(a))
    # Two repeats of three turns, each by both peers; within a turn no other prompt comes between.
    assert [p for _, p in log] == [0, 0, 1, 1, 1, 1] * 2
    assert all({log[i][0], log[i + 1][0]} == {"one", "two"} for i in range(0, len(log), 2))
    assert {log[i][0] for i in range(0, len(log), 2)} == {"one", "two"}, "the order rotates"
    assert told[-1][1] == told[-1][2] == 3 + 2 * 2 * 3
    turn = found.turns[1, 1][1]
    assert turn.prefill_seconds == [0.5, 0.5] and turn.decode_seconds == [1.0, 1.0]
    assert found.preparations[1].compile_seconds == 1.5
    assert found.costs == [None, None, None], "plain decoding alone has no draft to time"


def test_measured_texts_are_plain_decoding_s(trio: list[LoopContender], target: Target) -> None:
    found = measure(trio, PROMPTS, target, SETTINGS)
    for p in range(len(PROMPTS)):
        plain = [t.completion.tokens for t in found.turns[0, p]]
        for i in (1, 2):
            assert [t.completion.tokens for t in found.turns[i, p]] == plain
    assert found.repeatable == [True] * 3 and found.skipped_turns == [0] * 3
    assert all(len(t.decode_seconds) == 2 for turns in found.turns.values() for t in turns)
    costs = found.costs[1]
    assert costs is not None and costs.draft_cost > 0 and costs.t_ratio > 0


def test_a_turn_continues_with_the_contender_s_own_answer(target: Target) -> None:
    talk = Conversation(target, PROMPTS[1], 5, Info("x", "x", "greedy", temperature=1.0, top_k=3), SETTINGS)
    first = talk.next_request()
    assert first is not None and (first.id, first.temperature, first.top_k) == (5, 1.0, 3)
    answer = [*target.tokenizer.encode("blue"), target.eos_ids[0]]
    talk.answer(Completion(tuple(answer), "stop", 4, 4, *(np.zeros(0),) * 3, prompt_length=1))
    second = talk.next_request()
    assert second is not None and talk.next_request() is None
    text = target.tokenizer.decode(second.prompt, skip_special=False)
    assert text.startswith(target.tokenizer.decode(first.prompt, skip_special=False) + "blue")
    assert "Name another." in text and text.count("blue") == 1


def test_a_system_prompt_comes_first(target: Target) -> None:
    settings = Settings(max_new_tokens=4, system_prompt="Be brief.")
    request = Conversation(target, PROMPTS[0], 0, Info("x", "x", "greedy"), settings).next_request()
    expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]
    assert request is not None and request.prompt == encode(target, expected)


def test_turns_that_no_longer_fit_are_skipped_and_counted(trio: list[LoopContender], target: Target) -> None:
    import dataclasses

    log: list[tuple[str, int]] = []
    peer = scripted(log, "wordy", tokens=(40,) * 400)  # an answer beyond its budget, which the buffer has no room for
    first = Conversation(target, PROMPTS[1], 0, peer.info, SETTINGS).next_request()
    assert first is not None
    found = measure([trio[0], peer], PROMPTS[1:], target, dataclasses.replace(SETTINGS, repeats=1))
    assert found.skipped_turns == [0, 1] and len(found.turns[1, 0]) == 1


@pytest.mark.pitfall("tpu-inference#1360")
def test_compiling_while_timed_is_an_error(trio: list[LoopContender], target: Target) -> None:
    peer = scripted([], "careless", compiles=True)
    with pytest.raises(RuntimeError, match="careless compiled run while it was timed"):
        measure([trio[0], peer], PROMPTS[:1], target, SETTINGS)


def test_batches_are_timed_as_a_whole(trio: list[LoopContender], target: Target) -> None:
    alone = measure(trio[:2], PROMPTS, target, SETTINGS)
    found = measure(trio[:2], PROMPTS, target, Settings(max_new_tokens=12, repeats=2, batch=2))
    assert [len(w) for w in found.batch_times] == [2, 2]
    assert all(t.seconds > t.decode_seconds > 0 for w in found.batch_times for t in w)
    # The second turn is asked by one conversation alone: its request is repeated.
    assert all(t.segments[0].live == 2 and t.new_tokens == 4 * 12 for w in found.batch_times for t in w)
    for key, turns in alone.turns.items():
        assert [t.completion.tokens for t in found.turns[key]] == [t.completion.tokens for t in turns]
        assert all(not t.decode_seconds for t in found.turns[key])
    with pytest.raises(ValueError, match="wordy can only be measured at batch 1"):
        measure([trio[0], scripted([], "wordy")], PROMPTS, target, Settings(max_new_tokens=4, batch=2))


@pytest.mark.parametrize(("count", "batch", "expected"), [(8, 64, 64), (3, 2, 4), (4, 2, 4)])
def test_as_many_rows_are_at_work_as_the_batch_says(count: int, batch: int, expected: int) -> None:
    asked = [Request((5 + k,), 4, temperature=1.0, id=k) for k in range(count)]
    made = filled(asked, batch, count)
    assert len(made) == expected and made[:count] == asked
    assert len({request.id for request in made}) == expected, "what is repeated draws anew"
    assert {request.prompt for request in made[count:]} <= {request.prompt for request in asked}


def test_the_buffer_holds_the_longest_conversation(target: Target) -> None:
    buffer = buffer_for(target, PROMPTS, SETTINGS, 64)
    talk = Conversation(target, PROMPTS[1], 0, Info("x", "x", "greedy"), SETTINGS)
    talk.next_request()
    talk.answer(Completion((60,) * 12, "length", 11, 11, *(np.zeros(0),) * 3, prompt_length=1))
    second = talk.next_request()
    assert second is not None and len(second.prompt) + 12 + 64 <= buffer and buffer % 128 == 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0; expected at least 1"),
        ({"max_new_tokens": 4, "repeats": 0}, "repeats=0; expected at least 1"),
        ({"max_new_tokens": 4, "batch": -1}, "batch=-1; expected at least 1"),
        ({"max_new_tokens": 4, "loop_threshold": 2.0}, "loop_threshold=2.0; expected a ratio"),
        ({"max_new_tokens": 4, "template": "vicunna"}, "template='vicunna'; expected one of chat, plain, vicuna"),
        ({"max_new_tokens": 4, "long_prompts": "cut"}, "long_prompts='cut'; expected one of error, skip"),
    ],
)
def test_settings_out_of_range(wrong: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Settings(**wrong)


def test_contenders_that_cannot_be_compared(trio: list[LoopContender], target: Target) -> None:
    with pytest.raises(ValueError, match="no prompts"):
        measure(trio, (), target, SETTINGS)
    with pytest.raises(ValueError, match="different labels"):
        measure([trio[0], trio[0]], PROMPTS, target, SETTINGS)
    with pytest.raises(ValueError, match="'draft' has no baseline: add a row of the drafter autoregressive"):
        measure(trio[1:], PROMPTS, target, SETTINGS)


def test_a_prompt_beyond_the_context_stops_before_anything_compiles(trio: list[LoopContender], target: Target) -> None:
    long = Prompt("long", "writing", ("word " * target.context,))
    with pytest.raises(ValueError, match=f"prompt 'long' has .* tokens, but the model's context is {target.context}"):
        measure(trio, (PROMPTS[0], long), target, SETTINGS)


def test_prompts_beyond_the_context_are_skipped_and_named_on_request(target: Target) -> None:
    short, long = Prompt("short", "writing", ("Hi.",)), Prompt("long", "writing", ("word " * target.context,))
    skipping = Settings(max_new_tokens=4, long_prompts="skip")
    assert fitting(target, (short, long, PROMPTS[1]), skipping) == ((short, PROMPTS[1]), ("long",))
    alone = Prompt("book", "novels", ("word " * target.context,))
    with pytest.raises(ValueError, match="no prompt of category .novels. fits the model.s context of"):
        fitting(target, (short, alone), skipping)


def test_a_plain_template_has_only_the_text(target: Target) -> None:
    settings = Settings(max_new_tokens=4, template="plain", system_prompt="Be brief.")
    request = Conversation(target, PROMPTS[0], 0, Info("x", "x", "greedy"), settings).next_request()
    assert request is not None and target.tokenizer.decode(request.prompt) == "Be brief.\nSay hello."


def test_a_template_that_ships_or_of_a_file_takes_the_place_of_one_s_own(target: Target, tmp_path) -> None:
    """Vicuna's format as its authors document it: single spaces, and the end of text behind an answer."""
    talk = [("user", "Hello!"), ("assistant", "Hi."), ("user", "How are you?")]
    messages = [{"role": role, "content": content} for role, content in talk]

    def text(template: str, more: list[dict[str, str]] = []) -> str:  # noqa: B006
        return target.tokenizer.decode(encode(target, [*more, *messages], template), skip_special=False)

    start, end = (target.tokenizer.decode([i], skip_special=False) for i in (target.tokenizer.bos_id, 0))
    turns = f" USER: Hello! ASSISTANT: Hi.{end}USER: How are you? ASSISTANT:"
    assert text("vicuna").startswith(f"{start}A chat between a curious user and an artificial intelligence")
    assert text("vicuna").endswith(f"answers to the user's questions.{turns}")
    assert text("vicuna", [{"role": "system", "content": "Be brief."}]) == f"{start}Be brief.{turns}"
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert text(str(own)) == "[Hello!][Hi.][How are you?]"


def test_a_base_model_has_no_chat_template_to_fall_back_from(target: Target) -> None:
    import dataclasses

    base = dataclasses.replace(target, tokenizer=dataclasses.replace(target.tokenizer, chat_template=None))
    with pytest.raises(ValueError, match="template='chat', but the target's tokenizer has no chat .*vicuna"):
        fitting(base, PROMPTS, SETTINGS)
    (kept, _) = fitting(base, PROMPTS, Settings(max_new_tokens=4, template="plain"))
    assert kept == PROMPTS
