"""Every small study of the papers, one after another: python -m experiments.small --minutes=170

A study is a benchmark of configs/papers/<name>.py:small (some with a training before it) in runs/<name>, or another
program, as --list says; its summary goes to notebooks/results. Started again it skips what is finished, and goes on
within the study that was interrupted. Rows of heads that the zoo does not hold are left out, as each study says.

    NAME ...    studies; all of them where none is named
    --minutes   no study is begun after so long, and the one that runs is interrupted; 0 for no limit
    --runs      directory of the runs, runs by default
    --out       directory of the summaries, notebooks/results by default
    --list      prints the commands
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments import _main, summarise
from experiments._arguments import Parser

ROOT = Path(__file__).resolve().parents[1]
GRACE = 60  # seconds that an interrupted program has to end


@dataclasses.dataclass(frozen=True)
class Step:
    """One program.

    Attributes:
        module: of experiments.
        config: its config.
        run: name of its run directory.
        makes: file within it that says that it is finished; None for a program that writes the same files where it is
            interrupted: `finished` is then written here.
        more: further options; {runs} in them is the directory of the runs.
    """

    module: str
    config: str
    run: str
    makes: str | None = "results.json"
    more: tuple[str, ...] = ()

    def finished(self, runs: Path) -> Path:
        """What is there when it is finished."""
        return runs / self.run / (self.makes or "finished")

    def command(self, runs: Path) -> list[str]:
        """As it is typed."""
        program = ["-m", f"experiments.{self.module}", f"--config={self.config}", f"--workdir={runs / self.run}"]
        return [*program, *(option.format(runs=runs) for option in self.more)]


def paper(name: str, *more: str) -> Step:
    """A paper's benchmark."""
    return Step("benchmark", f"configs/papers/{name}.py:small", name, more=more)


# The target of gloeckle is made here, in half the steps of its config.
MTP4 = Step(
    "pretrain",
    "configs/mtp.py:small,heads=4",
    "mtp4",
    makes=None,
    more=("--config.train.steps=600", "--config.optimizer.steps=600"),
)
OF_MTP4 = (
    "--config.target.source={runs}/mtp4/target",
    "--config.prompts={runs}/mtp4/prompts.jsonl",
    "--config.rows.mtp.source={runs}/mtp4/drafter",
)


# What the ablations train on: 64 rows, and 64 held out.
STORE = Step(
    "hidden_states",
    "configs/hidden_states.py:smollm2",
    "ablations_store",
    makes=None,
    more=("--config.store.taps=(2, 15, 27)", "--config.parts.train.max_shards=1"),
)
ABLATIONS = Step(
    "ablate",
    "configs/ablations.py:smollm2,small",
    "ablations",
    more=(
        "--config.base.data.store={runs}/ablations_store/train",
        "--config.base.data.held_out.greedy={runs}/ablations_store/greedy",
        "--config.base.data.held_out.sampled={runs}/ablations_store/sampled",
    ),
)


# The cheapest first.
STUDIES: dict[str, tuple[Step, ...]] = {
    "leviathan": (paper("leviathan"),),
    "block_verification": (paper("block_verification"),),
    "lookahead": (paper("lookahead"),),
    "layerskip": (paper("layerskip"),),
    "medusa": (paper("medusa"),),
    "hydra": (paper("hydra"),),
    "eagle": (paper("eagle"),),
    "chen": (paper("chen"),),
    "spec_bench": (paper("spec_bench"),),
    "off_distribution": (Step("off_distribution", "configs/off_distribution.py", "off_distribution"),),
    "ablations": (STORE, ABLATIONS),
    "plan": (Step("plan", "configs/plan.py:smollm2", "plan"),),
    "gloeckle": (MTP4, paper("gloeckle", *OF_MTP4)),
}


def main(arguments: Sequence[str]) -> int:
    """Runs what is not finished.

    Returns:
        Exit code: 0, 1 where a study failed (the others are run), or 75 where the time was up.

    Raises:
        ValueError: an unknown study or option, or a limit below 0.
    """
    plain = argparse.RawTextHelpFormatter
    parser = Parser("python -m experiments.small", description=__doc__, formatter_class=plain)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--runs", default="runs", metavar="DIRECTORY")
    parser.add_argument("--out", default=str(summarise.OUT), metavar="DIRECTORY")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in STUDIES]
    if unknown:
        raise ValueError(f"no study {unknown[0]!r}; there are {', '.join(STUDIES)}")
    if not options.minutes >= 0:
        raise ValueError(f"--minutes={options.minutes:g}; expected at least 0")
    chosen, runs = options.names or list(STUDIES), Path(options.runs)
    if options.list:
        for name in chosen:
            for step in STUDIES[name]:
                print(shlex.join(["python", *step.command(runs)]))
        return 0
    until = time.monotonic() + 60 * options.minutes if options.minutes else math.inf
    failed = []
    for name in chosen:
        start, code = time.monotonic(), study(STUDIES[name], runs, until)
        if code == _main.RESTART:
            print(f"{name}: the time is up; the same command goes on from here", flush=True)
            return _main.RESTART
        if code:
            failed.append(name)
            continue
        print(f"{name}: {(time.monotonic() - start) / 60:.1f} minutes", flush=True)
        summarise.main([str(runs / name), f"--out={options.out}"])
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def study(steps: Sequence[Step], runs: Path, until: float) -> int:
    """Runs the steps that are not finished; the exit code of the first that fails, and `RESTART` when time is up."""
    for step in steps:
        if step.finished(runs).exists():
            continue
        if time.monotonic() >= until:
            return _main.RESTART
        command = [sys.executable, *step.command(runs.absolute())]
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            code = process.wait(None if math.isinf(until) else until - time.monotonic())
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return _main.RESTART
        if code:
            return code
        if step.makes is None:
            step.finished(runs).write_text(shlex.join(command))
    return 0


if __name__ == "__main__":
    with _main.one_line_errors():
        raise SystemExit(main(sys.argv[1:]))
