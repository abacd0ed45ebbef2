"""Runs a program with several command lines, from one process that imports the library once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Each case runs as a fork, made before JAX has started anything, with its output in files of its own. The module is
# run as the program: its last lines, under `if __name__ == "__main__"`, are what is tested.
DRIVER = """
import ast, importlib.util, json, os, runpy, sys
module, folder, cases = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
# What the program imports, but not the program, which defines flags.
source = open(importlib.util.find_spec(module).origin).read()
imports = [node for node in ast.parse(source).body if isinstance(node, (ast.Import, ast.ImportFrom))]
exec(compile(ast.Module(imports, []), module, "exec"))
for number, arguments in enumerate(cases):
    child = os.fork()
    if not child:
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{number}.{name}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = [module, *arguments]
        code = 99
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            import traceback
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code or 0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    code: int
    out: str
    err: str


def run_all(module: str, cases: Sequence[Sequence[str]], folder: Path) -> list[Outcome]:
    """The outcome of each command line, in order."""
    command = [sys.executable, "-c", DRIVER, module, str(folder), json.dumps([list(case) for case in cases])]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    codes = [int(line) for line in run.stdout.split()]
    return [
        Outcome(code, (folder / f"{i}.out").read_text(), (folder / f"{i}.err").read_text())
        for i, code in enumerate(codes)
    ]
