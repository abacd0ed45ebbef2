"""What the recipes share: the program's command line, checked names, and doing or printing the result."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with what every recipe takes."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("--name", required=True, help="of the job: lower-case letters, digits, hyphens")
    made.add_argument("--command", required=True, help="one line, such as 'python -m experiments.train --config=...'")
    made.add_argument("--dry-run", action="store_true", help="print what would be run, and run nothing")
    return made


def act(
    made: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    default: str,
    actions: Mapping[str, str],
    commands: Callable[[argparse.Namespace], list[list[str]]],
) -> None:
    """Does or prints what the chosen one of a recipe's actions needs.

    Args:
        made: the recipe's parser.
        arguments: the command line; None for the process's own.
        default: what is done where no action is named.
        actions: the other actions, and what each does.
        commands: the commands of the options, whose `action` is one of these.
    """
    made.set_defaults(action=default)
    for action, does in actions.items():
        made.add_argument(f"--{action}", dest="action", action="store_const", const=action, help=does)
    options = made.parse_args(arguments)
    try:
        found = commands(options)
    except ValueError as error:
        made.error(str(error))
    run_all(found, options.dry_run)


def check(name: str, command: str) -> None:
    """Checks what schedulers would cut or refuse much later.

    Raises:
        ValueError: a name that clusters do not take, a command of several lines, or one without a shared workdir.
    """
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise ValueError(f"name {name!r}: expected up to 40 lower-case letters, digits and hyphens, a letter first")
    if "\n" in command.strip():
        raise ValueError("the command has several lines, of which some launchers run the first only: write it on one")
    if not shlex.split(command):
        raise ValueError("the command is empty; expected one such as 'python -m experiments.train --config=...'")


def remote_workdir(command: str) -> str | None:
    """The `--workdir` of a command, or None."""
    for word, following in zip(words := shlex.split(command), [*words[1:], ""], strict=True):
        if word.startswith("--workdir="):
            return word.partition("=")[2]
        if word == "--workdir":
            return following
    return None


def need_bucket(command: str) -> None:
    """A run of several hosts keeps its checkpoints where all of them write.

    Raises:
        ValueError: the command's workdir is not on gs://.
    """
    place = remote_workdir(command)
    if place is None or not place.startswith("gs://"):
        raise ValueError(
            f"the command's workdir is {place!r}: hosts of a slice have no common disk, so give --workdir=gs://..."
        )


def run_all(commands: Sequence[Sequence[str]], dry_run: bool) -> None:
    """Runs commands one after the other, or prints them."""
    for command in commands:
        print(shlex.join(command))
        if not dry_run:
            subprocess.run(command, check=True)
