"""Published sets on the hub: addresses, Parquet, and what the hub's failures become. Nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from specjax.evaluation.hub import fetch_file
from specjax.evaluation.prompts import Prompt, gsm8k, load_prompts

ADDRESS = "hf://datasets/openai/gsm8k/main/test.parquet"


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    import pyarrow
    from pyarrow import parquet

    file = tmp_path / "test.parquet"
    parquet.write_table(pyarrow.table({"question": ["1 + 1?", "2 + 2?"], "answer": ["2", "4"]}), file)
    return file


def test_a_set_is_read_from_the_hub(parquet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple] = []

    def download(name: str, file: str, *, repo_type: str, revision: str | None) -> str:
        asked.append((name, file, repo_type, revision))
        return str(parquet)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    expected = (Prompt("gsm8k/1", "gsm8k", ("1 + 1?",)), Prompt("gsm8k/2", "gsm8k", ("2 + 2?",)))
    assert load_prompts(f"gsm8k:{ADDRESS}") == expected == gsm8k(parquet)
    load_prompts("gsm8k:hf://datasets/openai/gsm8k@v1/a/b.parquet")
    assert asked == [
        ("openai/gsm8k", "main/test.parquet", "dataset", None),
        ("openai/gsm8k", "a/b.parquet", "dataset", "v1"),
    ]


def test_a_broken_or_foreign_parquet_file(parquet: Path) -> None:
    with pytest.raises(ValueError, match="test.parquet, line 1: the row has no 'task_id'; its keys are .*question"):
        load_prompts(f"humaneval:{parquet}")
    parquet.write_bytes(parquet.read_bytes()[:50])
    with pytest.raises(ValueError, match="test.parquet is not a whole Parquet file"):
        gsm8k(parquet)


@pytest.mark.parametrize("address", ["hf://openai/gsm8k", "hf://datasets/openai/gsm8k", "hf://datasets/gsm8k/x.jsonl"])
def test_an_address_of_another_form(address: str) -> None:
    with pytest.raises(ValueError, match="is no address of a file on the hub; expected hf://datasets/<org>/<name>"):
        fetch_file(address)


# What the hub's errors look at, without the HTTP library that this version of it happens to use.
RESPONSE = SimpleNamespace(headers={}, request=None, status_code=404)


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (errors.RepositoryNotFoundError("x", response=RESPONSE), FileNotFoundError, "no data set 'openai/gsm8k'"),
        (errors.GatedRepoError("x", response=RESPONSE), PermissionError, "gated: accept its terms on"),
        (errors.RevisionNotFoundError("x", response=RESPONSE), FileNotFoundError, "has no revision 'v2'"),
        (errors.RemoteEntryNotFoundError("x", response=RESPONSE), FileNotFoundError, "has no file 'test.parquet'"),
        (
            errors.LocalEntryNotFoundError("offline"),
            ConnectionError,
            "not in the hub's cache.*give its path in place of",
        ),
        (OSError("no route"), ConnectionError, "could not be fetched .no route."),
    ],
)
def test_failures(raised: Exception, expected: type, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise raised

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(expected, match=message):
        fetch_file("hf://datasets/openai/gsm8k@v2/test.parquet")
