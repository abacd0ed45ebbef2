"""The example drafter of CONTRIBUTING.md passes the contract as printed."""

import re
from pathlib import Path

TEXT = (Path(__file__).resolve().parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_example_drafter_runs():
    section = TEXT.split("## A complete example drafter")[1].split("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], "CONTRIBUTING.md", "exec"), {"__name__": "example"})
