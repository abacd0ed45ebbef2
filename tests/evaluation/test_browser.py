"""A page in a browser: Chromium without a window, where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from specjax.evaluation.grid import Run
from specjax.evaluation.report import merged_page, page
from tests.evaluation.test_report import META, ROWS, TEXTS, row

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
# Clicks on the heading "tau" of the first table twice, and tells what each click made of it.
CLICKS = """
<script>
const head = [...document.querySelector("table").tHead.rows[0].cells].find((c) => c.textContent === "tau");
const order = () => [...document.querySelector("table").tBodies[0].rows].map((r) => r.cells[0].textContent);
const seen = [order()];
for (let i = 0; i < 2; i++) { head.firstChild.click(); seen.push([head.getAttribute("aria-sort"), order()]); }
document.body.dataset.seen = JSON.stringify(seen);
</script>
"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser: looked for {', '.join(BROWSERS)}")
    return found


def visit(browser: str, file: Path, *more: str) -> tuple[str, list[str]]:
    """The page's markup after its scripts ran, and what it wrote to the console."""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={file.parent / 'profile'}", "--window-size=1300,2000", *more, file.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout, [line for line in run.stderr.splitlines() if "CONSOLE" in line]


def test_a_click_sorts_and_nothing_complains(browser: str, tmp_path: Path) -> None:
    rows = [*ROWS, row("best", tau=10.5), row("never", tau=None, tau_ci=None)]
    text = page(META, rows, title="a page", definitions={"tau": "tokens"}, texts=TEXTS)
    file = tmp_path / "report.html"
    file.write_text(text.replace("</body>", CLICKS + "</body>"))
    dom, console = visit(browser, file, "--dump-dom")
    assert console == []
    found = re.search(r'<body data-seen="([^"]*)"', dom)
    assert found is not None
    start, (first, falling), (second, rising) = json.loads(found[1].replace("&quot;", '"'))
    assert start == ["plain", "draft", "slow", "best", "never"]
    assert (first, falling) == ("descending", ["best", "draft", "slow", "plain", "never"]), "10.5 is more than 2.5"
    assert (second, rising) == ("ascending", ["plain", "draft", "slow", "best", "never"])


def test_a_page_of_several_runs_is_drawn(browser: str, tmp_path: Path) -> None:
    from matplotlib import image

    rows = [*ROWS, row("other", category="code", rule="typical (lossy)")]
    file, shot = tmp_path / "report.html", tmp_path / "page.png"
    file.write_text(merged_page([Run("a", META, rows), Run("b", META, ROWS)], title="two runs"))
    _, console = visit(browser, file, f"--screenshot={shot}")
    assert console == []
    pixels = image.imread(shot)[..., :3]
    assert pixels.shape[:2] == (2000, 1300)
    ink = (pixels < 0.5).all(axis=-1)
    blue = np.abs(pixels - np.array([0x48, 0x78, 0xA8]) / 255).max(axis=-1) < 0.05
    assert 0.005 < ink.mean() < 0.3, "text on a light page"
    assert blue[500:].sum() > 1000, "bars of the plot under the tables"


def test_an_error_of_a_script_would_be_seen(browser: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.html"
    file.write_text("<!doctype html><title>x</title><script>undefinedName()</script>")
    _, console = visit(browser, file, "--dump-dom")
    assert any("undefinedName is not defined" in line for line in console)
