"""Prompts to measure on: the ones that ship with specjax, one's own, and the published evaluation sets.

Every loader returns a tuple of `Prompt`s in file order, and stops with one error that names the file and the
line when a row is not what its format promises. The published sets are read from the files their authors
publish, JSON lines (also packed, `.gz`) or Parquet, on disk or on the Hugging Face hub; none ships with specjax.
"""

from __future__ import annotations

import difflib
import gzip
import importlib.resources
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from etils import epath

from specjax.evaluation import hub

MT_BENCH_CATEGORIES = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip
SPEC_BENCH_CATEGORIES = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")

# Files of the sets whose authors publish them on the hub, by set and id.
HUB_FILES = {
    "gsm8k": {"openai/gsm8k": "main/test-00000-of-00001.parquet"},
    "humaneval": {"openai/openai_humaneval": "openai_humaneval/test-00000-of-00001.parquet"},
    "mbpp": {"google-research-datasets/mbpp": "full/{split}-00000-of-00001.parquet"},
}

# The splits of MBPP by task id, as its authors define them (Austin et al. 2021, arXiv:2108.07732).
MBPP_SPLITS = {
    "prompt": range(1, 11),
    "test": range(11, 511),
    "validation": range(511, 601),
    "train": range(601, 975),
}


@dataclass(frozen=True)
class Prompt:
    """One prompt: what a user says, turn by turn.

    Attributes:
      id: unique within its source.
      category: what results are grouped by.
      turns: the user's turns, at least one; the model answers each before it sees the next.
      subcategory: a finer grouping where the source has one.

    Raises:
      ValueError: a field is empty or of the wrong type.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    subcategory: str | None = None

    def __post_init__(self) -> None:
        for name in ("id", "category"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name} must be a non-empty string, got {value!r}")
        if not isinstance(self.turns, tuple) or not self.turns:
            raise ValueError(f"turns must hold at least one string, got {self.turns!r}")
        for turn in self.turns:
            if not isinstance(turn, str) or not turn.strip():
                raise ValueError(f"every turn must be a non-empty string, got {turn!r}")


def shipped_prompts(categories: Sequence[str] | None = None) -> tuple[Prompt, ...]:
    """The prompts that ship with specjax, written for it.

    Args:
      categories: keep only these; all of them by default.

    Raises:
      ValueError: a category does not exist, or the list of them is empty.
    """
    with importlib.resources.as_file(
        importlib.resources.files("specjax.evaluation") / "data" / "prompts.jsonl"
    ) as path:
        prompts = prompt_file(path)
    return prompts if categories is None else _keep_categories(prompts, categories)


def prompt_file(path: str | os.PathLike[str]) -> tuple[Prompt, ...]:
    """Prompts of one's own: JSON lines `{"id": ..., "category": ..., "turns": [...]}`."""

    def parse(row: dict[str, Any], _: int) -> Prompt:
        unknown = set(row) - {"id", "category", "turns", "subcategory"}
        if unknown:
            raise ValueError(f"unknown keys {sorted(unknown)}; a row has id, category, turns and perhaps subcategory")
        return Prompt(row["id"], row["category"], _turns(row), row.get("subcategory"))

    return _load(path, parse)


def spec_bench(path: str | os.PathLike[str]) -> tuple[Prompt, ...]:
    """Spec-Bench `question.jsonl` (Xia et al. 2024, arXiv:2401.07851): 480 prompts in six categories.

    The file names the eight MT-bench categories in place of "mt_bench", the name under which the benchmark
    reports them: here they become the subcategory. The other five categories have none.
    """
    in_file = (*MT_BENCH_CATEGORIES, *SPEC_BENCH_CATEGORIES[1:])

    def parse(row: dict[str, Any], _: int) -> Prompt:
        name = row["category"]
        if name not in in_file:
            raise ValueError(f"category {name!r} is not one that Spec-Bench's file has{_did_you_mean(name, in_file)}")
        if name in MT_BENCH_CATEGORIES:
            return Prompt(f"spec_bench/{row['question_id']}", "mt_bench", _turns(row), name)
        return Prompt(f"spec_bench/{row['question_id']}", name, _turns(row))

    return _load(path, parse)


def mt_bench(path: str | os.PathLike[str]) -> tuple[Prompt, ...]:
    """MT-bench `question.jsonl` (Zheng et al. 2023, arXiv:2306.05685): 80 prompts of two turns.

    The category is "mt_bench", as in Spec-Bench; the eight of the file are the subcategory.
    """

    def parse(row: dict[str, Any], _: int) -> Prompt:
        return Prompt(f"mt_bench/{row['question_id']}", "mt_bench", _turns(row), row["category"])

    return _load(path, parse)


def humaneval(path: str | os.PathLike[str]) -> tuple[Prompt, ...]:
    """HumanEval `HumanEval.jsonl` or `.jsonl.gz` (Chen et al. 2021, arXiv:2107.03374): 164 function heads.

    The turn is the file's prompt as it stands: signature and docstring of the function to complete.
    """

    def parse(row: dict[str, Any], _: int) -> Prompt:
        return Prompt(row["task_id"], "humaneval", (row["prompt"],))

    return _load(path, parse)


def gsm8k(path: str | os.PathLike[str]) -> tuple[Prompt, ...]:
    """GSM8K `test.jsonl` or `train.jsonl` (Cobbe et al. 2021, arXiv:2110.14168): 1,319 and 7,473 questions.

    The rows carry no id: theirs is the line number, from 1.
    """

    def parse(row: dict[str, Any], line: int) -> Prompt:
        return Prompt(f"gsm8k/{line}", "gsm8k", (row["question"],))

    return _load(path, parse)


def mbpp(path: str | os.PathLike[str], split: str | None = "test") -> tuple[Prompt, ...]:
    """MBPP `mbpp.jsonl` (Austin et al. 2021, arXiv:2108.07732): 974 tasks, each with tests.

    Args:
      path: the file of the authors, which holds every split.
      split: "test" (500 tasks), "validation" (90), "train" (374), "prompt" (10), or None for all. It is also
        the subcategory.

    Raises:
      ValueError: no such split.
    """
    if split is not None and split not in MBPP_SPLITS:
        raise ValueError(f"MBPP has no split {split!r}{_did_you_mean(split, MBPP_SPLITS)}")

    def parse(row: dict[str, Any], _: int) -> Prompt:
        task = row["task_id"]
        subcategory = next((name for name, ids in MBPP_SPLITS.items() if task in ids), None)
        if subcategory is None:
            raise ValueError(f"task_id must be 1 to 974, got {task!r}")
        tests = "\n".join(row["test_list"])
        turn = f"{row['text']}\nYour code should pass these tests:\n\n{tests}"
        return Prompt(f"mbpp/{task}", "mbpp", (turn,), subcategory)

    prompts = _load(path, parse)
    kept = tuple(prompt for prompt in prompts if split in (None, prompt.subcategory))
    if not kept:
        raise ValueError(
            f"{os.fspath(path)} holds no task of the split {split!r}: is it the whole file of the authors?"
        )
    return kept


FORMATS: dict[str, Callable[[str | os.PathLike[str]], tuple[Prompt, ...]]] = {
    "spec_bench": spec_bench,
    "mt_bench": mt_bench,
    "humaneval": humaneval,
    "gsm8k": gsm8k,
    "mbpp": mbpp,
}


def load_prompts(name_or_path: str | os.PathLike[str], limit_per_category: int | None = None) -> tuple[Prompt, ...]:
    """Loads prompts by one string, as a config or a command line gives it.

    Args:
      name_or_path: one of
        - "shipped", or "shipped:code,maths" for some of its categories;
        - a published set (the keys of `FORMATS`) and its file, as in "spec_bench:data/question.jsonl"; an id of the
          hub (`HUB_FILES`), as in "gsm8k:openai/gsm8k"; or any file there, as in
          "gsm8k:hf://datasets/openai/gsm8k/main/test-00000-of-00001.parquet". MBPP has splits, the test split by
          default: "mbpp/validation:data/mbpp.jsonl", "mbpp/all:..." for all of them;
        - the path of a file of one's own (`prompt_file`).
      limit_per_category: keep the first so many of each category; all of them by default.

    Raises:
      ValueError: no such name or category, a malformed row, a limit below 1.
      FileNotFoundError: no such file.
    """
    if limit_per_category is not None and limit_per_category < 1:
        raise ValueError(f"limit_per_category must be 1 or more, or None for all prompts; got {limit_per_category}")
    prompts = _by_name(os.fspath(name_or_path))
    if limit_per_category is None:
        return prompts
    seen: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
        if seen[prompt.category] <= limit_per_category:
            kept.append(prompt)
    return tuple(kept)


def _by_name(source: str) -> tuple[Prompt, ...]:
    """The prompts of `load_prompts`'s first argument."""
    name, colon, rest = source.partition(":")
    if name == "shipped":
        return shipped_prompts([part.strip() for part in rest.split(",")] if colon else None)
    published, slash, split = name.partition("/")
    if published in FORMATS and (colon or not slash):
        if slash and published != "mbpp":
            raise ValueError(f"{published} has no splits, only mbpp has: write {published}:<path>")
        if not rest:
            raise ValueError(f"{name} needs the path of its file: write {name}:<path>")
        file = _on_hub(published, rest, split or "test")
        if published == "mbpp":
            return mbpp(file, None if split == "all" else split or "test")
        return FORMATS[published](file)
    if epath.Path(source).exists():
        return prompt_file(source)
    raise ValueError(
        f"no prompts named {source!r}, and no file of that path{_did_you_mean(name, ['shipped', *FORMATS])}"
        " (each published set followed by :<path>), or the path of a file of your own"
    )


def _on_hub(name: str, source: str, split: str) -> str:
    """The address of a set's file where the source is its id on the hub; another source as it is.

    Raises:
        FileNotFoundError: it looks like an id, and is neither one of this set nor a file.
    """
    found = re.fullmatch(r"([\w.-]+/[\w.-]+)(@[\w.-]+)?", source)
    if found is None or epath.Path(source).exists():
        return source
    known = HUB_FILES.get(name, {})
    if found[1] in known:
        if split == "all":
            raise ValueError(f"{source} has one file a split: name one of {', '.join(MBPP_SPLITS)}")
        return f"{hub.SCHEME}datasets/{source}/{known[found[1]].format(split=split)}"
    if epath.Path(source).suffix in (".jsonl", ".json", ".gz", ".parquet"):
        return source
    raise FileNotFoundError(
        f"{name}:{source} is no file, and no id of this set on the hub ({', '.join(known) or 'it has none'}); a file "
        f"of another data set there is written {name}:{hub.FORM}"
    )


def _load(path: str | os.PathLike[str], parse: Callable[[dict[str, Any], int], Prompt]) -> tuple[Prompt, ...]:
    """Parses every row of a JSON-lines file, and puts file and line in front of what is wrong with one."""
    prompts: dict[str, Prompt] = {}
    for number, read in _rows(path):
        where = f"{os.fspath(path)}, line {number}"
        try:
            row = read()
            if not isinstance(row, dict):
                raise ValueError(f"expected a JSON object, got {str(row)[:60]!r}")
            prompt = parse(row, number)
        except KeyError as error:
            raise ValueError(f"{where}: the row has no {error.args[0]!r}; its keys are {sorted(row)}") from error
        except (ValueError, TypeError) as error:  # JSONDecodeError is a ValueError
            raise ValueError(f"{where}: {error}") from error
        if prompt.id in prompts:
            raise ValueError(f"{where}: the id {prompt.id!r} was used on an earlier line; ids must be unique")
        prompts[prompt.id] = prompt
    if not prompts:
        raise ValueError(f"{os.fspath(path)} holds no prompts")
    return tuple(prompts.values())


def _rows(path: str | os.PathLike[str]) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Number (from 1) of every row, and what reads it."""
    on_hub = os.fspath(path).startswith(hub.SCHEME)
    file = epath.Path(hub.fetch_file(os.fspath(path)) if on_hub else path)
    if not file.is_file():
        raise FileNotFoundError(f"no prompt file at {os.fspath(path)!r}: expected the path of a JSON-lines file")
    if file.suffix == ".parquet":
        for number, row in enumerate(_parquet(file), start=1):
            yield number, partial(dict, row)
        return
    for number, line in _lines(file):
        yield number, partial(json.loads, line)


def _parquet(file: epath.Path) -> list[dict[str, Any]]:
    from pyarrow import ArrowInvalid, BufferReader, parquet

    try:
        rows: list[dict[str, Any]] = parquet.read_table(BufferReader(file.read_bytes())).to_pylist()
    except ArrowInvalid as error:
        raise ValueError(f"{file} is not a whole Parquet file: {error}") from error
    return rows


def _lines(file: epath.Path) -> Iterator[tuple[int, str]]:
    """Number (from 1) and text of every line that is not blank; `.gz` is unpacked."""
    data = file.read_bytes()
    try:
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{file} is not a whole UTF-8 JSON-lines file: {error}") from error
    # Not splitlines: JSON strings may hold U+2028 and its like, which are no line ends here.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line


def _turns(row: dict[str, Any]) -> tuple[str, ...]:
    """The row's turns as a tuple."""
    turns = row["turns"]
    if not isinstance(turns, list):
        raise ValueError(f"turns must be a list of strings, got {turns!r}")
    return tuple(turns)


def _keep_categories(prompts: tuple[Prompt, ...], categories: Sequence[str]) -> tuple[Prompt, ...]:
    """The prompts of these categories."""
    known = tuple(dict.fromkeys(prompt.category for prompt in prompts))
    if isinstance(categories, str) or not categories:
        raise ValueError(f"categories must be a list of one or more of {', '.join(known)}; got {categories!r}")
    for category in categories:
        if category not in known:
            raise ValueError(f"no prompts of category {category!r}{_did_you_mean(category, known)}")
    return tuple(prompt for prompt in prompts if prompt.category in categories)


def _did_you_mean(name: object, known: Iterable[str]) -> str:
    """The end of an error about an unknown name."""
    known = list(known)
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{hint} Known: {', '.join(known)}"
