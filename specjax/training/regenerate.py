"""Text that the target writes itself: its answers to prompts, through the decoding loop, resumable by prompt."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence

from etils import epath

from specjax.checkpoints.rundir import write_whole
from specjax.decoding import Completion, Loop, Request, Weights, generate
from specjax.models.target import Target
from specjax.training.data import Answer, json_lines, read_answers


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A user's turn.

    Attributes:
        source: name of the prompt set.
        id: within it.
        text: what the user says.
    """

    source: str
    id: int | str
    text: str


@dataclasses.dataclass(frozen=True)
class RegenerateConfig:
    """How prompts are answered.

    Attributes:
        temperature: 0 for greedy.
        max_new_tokens: budget of an answer.
        batch: rows that run together; a finished one takes the next prompt at once.
        part: prompts a part, the most that an interruption costs.
        seed: with a prompt's source and id it fixes the answer, whatever runs beside it.
    """

    temperature: float = 0.0
    max_new_tokens: int = 192
    batch: int = 8
    part: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch", "part"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; expected at least 1")


def read_prompts(path: str | epath.Path) -> list[Prompt]:
    """Prompts of a JSONL file with `source`, `id` and `prompt` (further keys are ignored), each of them once.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line lacks a field, or has an empty prompt; names file and line.
    """
    path = epath.Path(path)
    prompts: dict[tuple[str, str], Prompt] = {}
    for where, entry in json_lines(path):
        missing = [name for name in ("source", "id", "prompt") if name not in entry]
        if missing:
            raise ValueError(f"{where} lacks {', '.join(missing)}; it has {', '.join(entry)}")
        if not str(entry["prompt"]).strip():
            raise ValueError(f"{where} has an empty prompt; expected some text")
        prompt = Prompt(entry["source"], entry["id"], entry["prompt"])
        prompts.setdefault((prompt.source, str(prompt.id)), prompt)
    if not prompts:
        raise ValueError(f"{path} holds no prompts; expected at least one line")
    return list(prompts.values())


def regenerate(
    prompts: Sequence[Prompt],
    target: Target,
    loop: Loop,
    weights: Weights,
    directory: str | epath.Path,
    config: RegenerateConfig,
    report: Callable[[int, int], None] = lambda done, total: None,
    share: tuple[int, int] = (0, 1),
) -> int:
    """Answers the prompts that the directory has no answer to yet, part by part.

    Several processes share the prompts by their place in the list: one that starts late, or a run that goes on with
    another number of them, answers none twice.

    Args:
        prompts: what to answer.
        target: gives chat template and limits.
        loop: any drafter with an exact rule: the answers' law is the target's whatever it is.
        weights: of the loop.
        directory: of `part-*.jsonl`, one written once for each part.
        config: see `RegenerateConfig`.
        report: called with prompts done and in all, of this process's share.
        share: this process and how many there are. Each decodes on devices of its own, and writes parts of its own.

    Returns:
        How many answers were written by this call.

    Raises:
        ValueError: a prompt does not fit the context, or a process beyond their number.
        FloatingPointError: NaN logits.
    """
    index, count = share
    if not 0 <= index < count:
        raise ValueError(f"share={share}: expected (process, number of processes) with a process of 0..{count - 1}")
    directory, own = epath.Path(directory), "" if count == 1 else f"-{index:04d}"
    directory.mkdir(parents=True, exist_ok=True)
    prompts = prompts[index::count]
    parts = sorted(directory.glob("part-*.jsonl"))
    known = {answer.key for part in parts for answer in read_answers(part)}
    waiting = [p for p in prompts if (p.source, str(p.id), config.temperature) not in known]
    done = len(prompts) - len(waiting)
    report(done, len(prompts))
    # Not by their count: a part may have been removed, to be answered again.
    numbers = (part.stem.removeprefix("part-").partition("-")[0] for part in parts)
    free = max((int(number) for number in numbers if number.isdigit()), default=-1) + 1
    for number, first in enumerate(range(0, len(waiting), config.part), free):
        chosen = waiting[first : first + config.part]
        requests = [_request(prompt, target, config) for prompt in chosen]
        completions = generate(
            loop,
            weights,
            requests,
            context=target.context,
            vocab=target.config.vocab_size,
            seed=config.seed,
            batch=config.batch,
        )
        answers = [_answer(*pair, target, config) for pair in zip(chosen, completions, strict=True)]
        lines = [json.dumps(dataclasses.asdict(answer), ensure_ascii=False) + "\n" for answer in answers]
        write_whole(directory / f"part-{number:06d}{own}.jsonl", "".join(lines))
        done += len(chosen)
        report(done, len(prompts))
    return len(waiting)


def _request(prompt: Prompt, target: Target, config: RegenerateConfig) -> Request:
    ids = target.tokenizer.apply_chat([{"role": "user", "content": prompt.text}])
    name = hashlib.sha256(f"{prompt.source}\0{prompt.id}".encode()).digest()
    return Request(
        prompt=tuple(ids),
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        id=int.from_bytes(name[:4], "little") >> 1,
    )


def _answer(prompt: Prompt, completion: Completion, target: Target, config: RegenerateConfig) -> Answer:
    return Answer(
        source=prompt.source,
        id=prompt.id,
        temperature=config.temperature,
        prompt=prompt.text,
        response_ids=completion.tokens,
        response=target.tokenizer.decode(completion.tokens),
        finish=completion.finish,
    )
