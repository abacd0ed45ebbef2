"""The list of pitfalls is read right, and a row counts as guarded only when a mark names it."""

from pathlib import Path

import pytest

from tests import pitfalls

LISTING = """
# A list
| Thread | Symptom |
|---|---|
| other#1 | outside the sections |

### 3a. Law
| Thread | Symptom | Test |
|---|---|---|
| EAGLE#329,#183; vllm#7 | wrong q | enumerate |
| SpecJAX ops | accuracy | mask |

### 3b. Cache
| Thread | Symptom | Test |
|:--|:-:|---|
| mlx-lm#1528 | stale n | property |

### 4. Elsewhere
| x#9 | y | z |
"""


def test_rows_are_read_from_their_sections() -> None:
    rows = pitfalls.parse(LISTING)
    assert [(row.section, row.symptom) for row in rows] == [
        ("3a", "wrong q"),
        ("3a", "accuracy"),
        ("3b", "stale n"),
    ]
    assert rows[0].threads == ("EAGLE#329", "EAGLE#183", "vllm#7")
    assert rows[1].threads == ("SpecJAX ops",)


def test_a_file_without_the_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="is this the list of pitfalls"):
        pitfalls.parse("# Nothing\n| a | b |\n")


def test_coverage() -> None:
    rows = pitfalls.parse(LISTING)
    report = pitfalls.coverage(rows, {"EAGLE#183": "test_a", "mlx-lm#15280": "test_b"})
    assert [row.name for row in report.guarded] == ["EAGLE#329,#183; vllm#7"]
    assert [row.name for row in report.unguarded] == ["SpecJAX ops", "mlx-lm#1528"]
    assert report.unknown == {"mlx-lm#15280": "test_b"}
    assert "1 of 3 have a test" in report.text()
    assert "no test: 3b mlx-lm#1528: stale n" in report.text()
    assert "no such pitfall: 'mlx-lm#15280', in test_b" in report.text()


def test_a_mark_may_name_several_threads_and_an_owner() -> None:
    rows = pitfalls.parse(LISTING.replace("EAGLE#329,#183;", "SafeAILab/EAGLE#329,#183;"))
    assert rows[0].threads == ("SafeAILab/EAGLE#329", "SafeAILab/EAGLE#183", "vllm#7")
    report = pitfalls.coverage(rows, {"SafeAILab/EAGLE#183,#184; vllm#7": "test_a"})
    assert report.guarded == rows[:1]
    assert report.unknown == {"SafeAILab/EAGLE#184": "test_a"}


def test_the_list_itself(data_dir: Path) -> None:
    listing = data_dir.resolve().parent / "PITFALLS.md"
    if not listing.is_file():
        pytest.skip(f"no {listing}")
    rows = pitfalls.parse(listing.read_text(encoding="utf-8"))
    assert {row.section for row in rows} == {"3a", "3b", "3c", "3d", "3e", "3f"}
    assert all(row.threads and row.symptom for row in rows)
    assert len({row.name for row in rows}) == len(rows)
