"""The shipped prompts hold what they promise; the loaders read the published files and refuse broken ones."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from specjax.evaluation import prompts as P

CATEGORIES = (
    "writing", "summarising", "question_answering", "reasoning", "maths", "code", "translation", "multi_turn",
)  # fmt: skip


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_shipped_prompts_cover_every_category() -> None:
    prompts = P.shipped_prompts()
    counts = Counter(prompt.category for prompt in prompts)
    assert tuple(counts) == CATEGORIES
    assert len(prompts) >= 40 and min(counts.values()) >= 5
    assert len({prompt.turns for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        assert prompt.id.startswith(prompt.category)
        assert len(prompt.turns) in ((2, 3) if prompt.category == "multi_turn" else (1,))


def test_shipped_passages_are_long_enough_to_summarise() -> None:
    for prompt in P.shipped_prompts(["summarising"]):
        _, passage = prompt.turns[0].split("\n\n", 1)
        assert 120 <= len(passage.split()) <= 200, prompt.id


def test_shipped_prompts_are_not_from_the_published_sets(data_dir: Path) -> None:
    published = {
        turn
        for loader, name in (
            (P.spec_bench, "spec_bench/question.jsonl"),
            (P.gsm8k, "gsm8k/test.jsonl"),
            (P.gsm8k, "gsm8k/train.jsonl"),
            (P.mbpp, "mbpp/mbpp.jsonl"),
        )
        for prompt in loader(data_dir / name)
        for turn in prompt.turns
    }
    assert not published.intersection(turn for prompt in P.shipped_prompts() for turn in prompt.turns)


def test_shipped_prompts_of_some_categories() -> None:
    prompts = P.shipped_prompts(["maths", "code"])
    assert {prompt.category for prompt in prompts} == {"maths", "code"}
    with pytest.raises(ValueError, match="no prompts of category 'math'; did you mean 'maths'"):
        P.shipped_prompts(["math"])
    with pytest.raises(ValueError, match="one or more of writing"):
        P.shipped_prompts([])
    with pytest.raises(ValueError, match="must be a list"):
        P.shipped_prompts("maths")


def test_spec_bench(data_dir: Path) -> None:
    prompts = P.spec_bench(data_dir / "spec_bench/question.jsonl")
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(P.SPEC_BENCH_CATEGORIES, 80)
    subcategories = Counter(prompt.subcategory for prompt in prompts)
    assert subcategories == {None: 400} | dict.fromkeys(P.MT_BENCH_CATEGORIES, 10)
    assert all((prompt.subcategory is not None) == (prompt.category == "mt_bench") for prompt in prompts)
    assert {len(prompt.turns) for prompt in prompts if prompt.category == "mt_bench"} == {2}


def test_mt_bench(data_dir: Path) -> None:
    prompts = P.mt_bench(data_dir / "mt_bench/question.jsonl")
    assert len(prompts) == 80 and {len(prompt.turns) for prompt in prompts} == {2}
    assert Counter(prompt.subcategory for prompt in prompts) == dict.fromkeys(P.MT_BENCH_CATEGORIES, 10)


def test_humaneval(data_dir: Path, tmp_path: Path) -> None:
    packed = data_dir / "humaneval/HumanEval.jsonl.gz"
    prompts = P.humaneval(packed)
    assert len(prompts) == 164 and prompts[0].id == "HumanEval/0"
    assert all("def " in prompt.turns[0] for prompt in prompts)
    plain = tmp_path / "HumanEval.jsonl"
    plain.write_bytes(gzip.decompress(packed.read_bytes()))
    assert P.humaneval(plain) == prompts


@pytest.mark.parametrize(("name", "count"), [("test", 1319), ("train", 7473)])
def test_gsm8k(data_dir: Path, name: str, count: int) -> None:
    prompts = P.gsm8k(data_dir / f"gsm8k/{name}.jsonl")
    assert len(prompts) == count
    assert not any("####" in prompt.turns[0] for prompt in prompts), "the answer must not be in the prompt"


def test_mbpp(data_dir: Path) -> None:
    path = data_dir / "mbpp/mbpp.jsonl"
    assert Counter(prompt.subcategory for prompt in P.mbpp(path, split=None)) == {
        "prompt": 10, "test": 500, "validation": 90, "train": 374,
    }  # fmt: skip
    assert len(P.load_prompts(f"mbpp:{path}")) == 500 and len(P.load_prompts(f"mbpp/validation:{path}")) == 90
    assert len(P.load_prompts(f"mbpp/all:{path}")) == 974
    test = P.mbpp(path)
    assert len(test) == 500 and test[0].id == "mbpp/11"
    assert all("assert" in prompt.turns[0] for prompt in test)
    with pytest.raises(ValueError, match="no split 'tests'; did you mean 'test'"):
        P.mbpp(path, split="tests")


def test_load_prompts_by_name(data_dir: Path, tmp_path: Path) -> None:
    assert P.load_prompts("shipped") == P.shipped_prompts()
    assert P.load_prompts("shipped:code, maths") == P.shipped_prompts(["code", "maths"])
    path = data_dir / "spec_bench/question.jsonl"
    ten = P.load_prompts(f"spec_bench:{path}", limit_per_category=10)
    assert Counter(prompt.category for prompt in ten) == dict.fromkeys(P.SPEC_BENCH_CATEGORIES, 10)
    assert ten[0] == P.spec_bench(path)[0]
    own = write_rows(tmp_path / "own.jsonl", {"id": "a", "category": "law", "turns": ["What is\u2028a tort?"]}, "\n")
    assert P.load_prompts(own) == (P.Prompt("a", "law", ("What is\u2028a tort?",)),)


def test_load_prompts_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="named 'shiped'.*did you mean 'shipped'.*spec_bench"):
        P.load_prompts("shiped")
    with pytest.raises(ValueError, match="did you mean 'humaneval'"):
        P.load_prompts("human_eval:somewhere.jsonl")
    with pytest.raises(ValueError, match="write gsm8k:<path>"):
        P.load_prompts("gsm8k")
    with pytest.raises(FileNotFoundError, match="no prompt file at 'nowhere.jsonl'"):
        P.load_prompts("gsm8k:nowhere.jsonl")
    with pytest.raises(ValueError, match="limit_per_category must be 1 or more.*got 0"):
        P.load_prompts("shipped", limit_per_category=0)


GOOD = {"id": "a-01", "category": "a", "turns": ["Hello."]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"id": "b"\n', "line 2: Expecting"),
        ([1, 2], "line 2: expected a JSON object"),
        ({"id": "b", "turns": ["x"]}, "line 2: the row has no 'category'; its keys are .'id', 'turns'"),
        ({"id": "b", "category": " ", "turns": ["x"]}, "line 2: category must be a non-empty string"),
        ({"id": 7, "category": "a", "turns": ["x"]}, "line 2: id must be a non-empty string, got 7"),
        ({"id": "b", "category": "a", "turns": []}, "line 2: turns must hold at least one string"),
        ({"id": "b", "category": "a", "turns": "x"}, "line 2: turns must be a list of strings, got 'x'"),
        ({"id": "b", "category": "a", "turns": ["x", ""]}, "line 2: every turn must be a non-empty string"),
        ({"id": "b", "category": "a", "turns": ["x"], "turn": "y"}, "line 2: unknown keys .'turn'"),
        (GOOD, "line 2: the id 'a-01' was used on an earlier line"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path: Path, row: object, message: str) -> None:
    path = write_rows(tmp_path / "own.jsonl", GOOD, row)
    with pytest.raises(ValueError, match=f"own.jsonl, {message}"):
        P.prompt_file(path)


def test_a_row_of_another_format_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "question.jsonl", {"question_id": 1, "category": "maths", "turns": ["x"]})
    with pytest.raises(
        ValueError,
        match="line 1: category 'maths' is not one that Spec-Bench's file has; did you mean 'math'",
    ):
        P.spec_bench(path)
    with pytest.raises(ValueError, match="line 1: the row has no 'task_id'"):
        P.mbpp(path)
    path = write_rows(tmp_path / "mbpp.jsonl", {"task_id": 2000, "text": "x", "test_list": []})
    with pytest.raises(ValueError, match="task_id must be 1 to 974, got 2000"):
        P.mbpp(path)
    path = write_rows(tmp_path / "mbpp.jsonl", {"task_id": 20, "text": "x", "test_list": [1]})
    with pytest.raises(ValueError, match="line 1: sequence item 0: expected str"):
        P.mbpp(path)


def test_a_file_without_prompts_or_broken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="empty.jsonl holds no prompts"):
        P.prompt_file(write_rows(tmp_path / "empty.jsonl", "\n"))
    packed = gzip.compress(b'{"task_id": "HumanEval/0"}\n' * 50)
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match="cut.jsonl.gz is not a whole UTF-8 JSON-lines file"):
        P.humaneval(tmp_path / "cut.jsonl.gz")
    with pytest.raises(FileNotFoundError, match="no prompt file"):
        P.prompt_file(tmp_path)
    path = write_rows(tmp_path / "mbpp.jsonl", {"task_id": 1, "text": "x", "test_list": []})
    with pytest.raises(ValueError, match="holds no task of the split 'test'"):
        P.mbpp(path)


def test_ids_of_the_hub_stand_for_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(address: str) -> Path:
        asked.append(address)
        name = "mbpp.jsonl" if "mbpp" in address else "gsm8k.jsonl"
        rows = {"mbpp.jsonl": {"task_id": 520, "text": "x", "test_list": []}, "gsm8k.jsonl": {"question": "x"}}
        return write_rows(tmp_path / name, rows[name])

    monkeypatch.setattr(P.hub, "fetch_file", fetch)
    P.load_prompts("gsm8k:openai/gsm8k")
    P.load_prompts("mbpp/validation:google-research-datasets/mbpp@v1")
    assert asked == [
        "hf://datasets/openai/gsm8k/main/test-00000-of-00001.parquet",
        "hf://datasets/google-research-datasets/mbpp@v1/full/validation-00000-of-00001.parquet",
    ]
    with pytest.raises(
        FileNotFoundError, match="gsm8k:openai/gsm9k is no file, and no id .*openai/gsm8k.*hf://datasets/"
    ):
        P.load_prompts("gsm8k:openai/gsm9k")
    with pytest.raises(ValueError, match="has one file a split: name one of prompt, test"):
        P.load_prompts("mbpp/all:google-research-datasets/mbpp")
    with pytest.raises(ValueError, match="MBPP has no split 'tets'; did you mean 'test'"):
        P.load_prompts("mbpp/tets:google-research-datasets/mbpp")
    with pytest.raises(ValueError, match="gsm8k has no splits"):
        P.load_prompts("gsm8k/test:openai/gsm8k")
