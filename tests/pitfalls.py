"""Which known pitfalls have a test: `pytest --pitfalls`.

The list is a Markdown file of public bug reports, one table a section, the first column naming the threads. A
test guards a row by naming one of its threads: `@pytest.mark.pitfall("vllm#6038")`. A row without a thread is
named by the text of its first column.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

SECTION = re.compile(r"^###\s+(3[a-f])\.")
# "EAGLE#329,#183": a repository's name, then one or more numbers.
THREADS = re.compile(r"([\w./-]+)(#\d+(?:\s*,\s*#\d+)*)")


@dataclass(frozen=True)
class Row:
    """One pitfall.

    Attributes:
      section: "3a" to "3f".
      name: the first column as written.
      threads: what a mark may say to mean this row.
      symptom: the second column.
    """

    section: str
    name: str
    threads: tuple[str, ...]
    symptom: str


@dataclass(frozen=True)
class Coverage:
    """Rows by whether a test is marked for them, and marks that fit no row (mark to test)."""

    guarded: tuple[Row, ...]
    unguarded: tuple[Row, ...]
    unknown: Mapping[str, str]

    def text(self) -> str:
        """The report, a line for each row without a test and for each mark without a row."""
        total = len(self.guarded) + len(self.unguarded)
        lines = [f"pitfalls: {len(self.guarded)} of {total} have a test"]
        lines += [f"  no test: {row.section} {row.name}: {row.symptom}" for row in self.unguarded]
        lines += [f"  no such pitfall: {thread!r}, in {test}" for thread, test in self.unknown.items()]
        return "\n".join(lines)


def parse(markdown: str) -> tuple[Row, ...]:
    """The rows of the tables in sections 3a to 3f.

    Raises:
      ValueError: there are none, so the file is not the list.
    """
    rows, section, header = [], None, True
    for line in markdown.splitlines():
        if line.startswith("#"):
            match = SECTION.match(line)
            section, header = (match[1] if match else None), True
        elif section and line.startswith("|"):
            if header:
                header = not set(line) <= set("|-: ")  # the header ends with the ruled line
                continue
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            rows.append(Row(section, cells[0], threads(cells[0]), cells[1]))
    if not rows:
        raise ValueError("no tables in sections '### 3a.' to '### 3f.': is this the list of pitfalls?")
    return tuple(rows)


def threads(cell: str) -> tuple[str, ...]:
    """The threads a first column names, or its whole text where it names none.

    >>> threads("EAGLE#329,#183; vllm#7")
    ('EAGLE#329', 'EAGLE#183', 'vllm#7')
    >>> threads("SpecJAX ops")
    ('SpecJAX ops',)
    """
    found = tuple(
        f"{repository}{number}"
        for repository, numbers in THREADS.findall(cell)
        for number in re.findall(r"#\d+", numbers)
    )
    return found or (cell,)


def coverage(rows: tuple[Row, ...], marks: Mapping[str, str]) -> Coverage:
    """Holds the marks (to test) against the rows; a mark names a thread, or several as a first column does."""
    marked = {thread: test for mark, test in marks.items() for thread in threads(mark)}
    guarded = tuple(row for row in rows if any(thread in marked for thread in row.threads))
    known = {thread for row in rows for thread in row.threads}
    return Coverage(
        guarded=guarded,
        unguarded=tuple(row for row in rows if row not in guarded),
        unknown={thread: test for thread, test in marked.items() if thread not in known},
    )
