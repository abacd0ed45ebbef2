"""Pieces of an HTML page that needs nothing but itself: every text is escaped, tables sort where there is a script."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } h3 { font-size: 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.92rem; }
.wide { overflow-x: auto; }
th, td { padding: 0.25rem 0.7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } tr.best td { font-weight: 600; }
th button { all: unset; cursor: pointer; font-weight: 600; } th button:focus-visible { outline: 2px solid #4878a8; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
img { max-width: 100%; } dt { font-weight: 600; } dd { margin: 0 0 0.5rem 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f4; padding: 0.8rem; border-radius: 4px;
  font: 14px/1.6 ui-monospace, monospace; }
mark { background: #bfe3c4; color: inherit; border-radius: 2px; } .question { color: #555; }
"""

# A click on a heading sorts by it, falling first; a second one turns it round. Empty cells stay last.
SCRIPT = """
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const falling = head.getAttribute("aria-sort") !== "descending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", falling ? "descending" : "ascending");
    const key = (row) => row.cells[column].dataset.value;
    const rows = [...table.tBodies[0].rows];
    const numbers = rows.every((row) => !key(row) || !Number.isNaN(Number(key(row))));
    rows.sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (!x || !y) return !x - !y;
      const order = numbers ? x - y : x.localeCompare(y);
      return falling ? -order : order;
    });
    table.tBodies[0].append(...rows);
  }));
}
"""


@dataclass(frozen=True)
class Cell:
    """A table's cell.

    Attributes:
        text: what is shown.
        value: what is sorted by; None where there is nothing, which comes last.
        strong: which of the texts, that stand with a slash between them, are set in bold; none where it is empty.
    """

    text: str | tuple[str, ...]
    value: float | str | None
    strong: tuple[bool, ...] = ()


def cell(value: Any, text: str | None = None) -> Cell:
    """A cell that sorts by a value and shows a text, by default the value itself."""
    return Cell(str(value) if text is None else text, value)


def table(head: Sequence[str], rows: Iterable[Sequence[Cell]], best: Iterable[int] = ()) -> str:
    """A sortable table; the rows of these numbers are set in bold."""
    marked = set(best)
    top = "".join(f'<th scope="col"><button type="button">{escape(text)}</button></th>' for text in head)
    lines = []
    for number, cells in enumerate(rows):
        inner = "".join(f'<td data-value="{escape(_key(c.value))}">{_text(c)}</td>' for c in cells)
        lines.append(f"<tr{' class=best' if number in marked else ''}>{inner}</tr>")
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def image(png: bytes | None, says: str) -> str:
    """A PNG within the page; nothing where there is none."""
    if png is None:
        return ""
    return f'<img alt="{escape(says)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def section(title: str, *parts: str) -> str:
    """A heading and what stands under it; nothing where that is empty."""
    body = "".join(parts)
    return f"<h2>{escape(title)}</h2>{body}" if body else ""


def definitions(entries: Mapping[str, Any]) -> str:
    """Names and what they mean."""
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(plain(v))}</dd>" for k, v in entries.items()) + "</dl>"


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # The page asks for nothing, not even an icon.
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{''.join(parts)}"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def escape(value: Any) -> str:
    """Text as it is to be read."""
    return html.escape(str(value))


def plain(value: Any) -> str:
    """A JSON value on one line."""
    if isinstance(value, Mapping):
        return "; ".join(f"{k}: {plain(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(plain(v) for v in value)
    return str(value)


def _text(one: Cell) -> str:
    texts = (one.text,) if isinstance(one.text, str) else one.text
    strong = one.strong or (False,) * len(texts)
    return " / ".join(f"<b>{escape(t)}</b>" if bold else escape(t) for t, bold in zip(texts, strong, strict=True))


def _key(value: float | str | None) -> str:
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)
