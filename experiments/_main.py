"""What the programs share: `--config` and `--workdir`, the compilation cache, and errors of one line.

A program ends in `_main.run(main, config="configs/quickstart.py", workdir="runs/quickstart")`.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections
from absl import app, flags, logging
from etils import epath
from ml_collections import config_flags
from rich.console import Console

from specjax import build, parallel

JAX_CACHE = "~/.cache/specjax/jax"
DATA = "../shared/data"  # Where texts and prompts are looked for when SPECJAX_DATA is not set.

RESTART = 75  # EX_TEMPFAIL: interrupted, saved, to be started again with the same command.

# What a user can put right: printed as one line, exit code 2. Anything else is a fault of ours, with a traceback.
EXPECTED = (
    ValueError,
    OSError,  # files, the network, a full disk, other processes
    FloatingPointError,
    ImportError,
)
LASTING = (FileNotFoundError, PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError)


def run(main: Callable[[ml_collections.ConfigDict], None], *, config: str, workdir: str | None = None) -> None:
    """Reads the command line, then calls `main` with the locked config.

    Args:
        main: the program.
        config: the config file that is used where the command line names none.
        workdir: default of `--workdir`; None for a program that writes nothing.
    """
    if workdir is not None:
        flags.DEFINE_string("workdir", workdir, "run directory, local or gs://")
    flags.DEFINE_enum("distributed", "auto", ["auto", "off", "explicit"], "whether to join other processes")
    flags.DEFINE_string("coordinator", None, "host:port of process 0; found by itself on TPU pods and SLURM")
    flags.DEFINE_integer("num_processes", None, "processes of the run")
    flags.DEFINE_integer("process_id", None, "of this process, from 0")
    flags.DEFINE_list("local_devices", None, "numbers of this host's GPUs that this process uses, such as 0,1")
    flags.DEFINE_float("start_timeout", 120, "seconds that processes wait for each other", lower_bound=0)
    flags.DEFINE_enum("require_platform", None, parallel.PLATFORMS, "refuse to run on another kind of device")
    holder: list[ml_collections.ConfigDict] = []

    def parse(argv: Sequence[str]) -> list[str]:
        with one_line_errors():
            rest = _define_config(argv, config)
            left = flags.FLAGS([argv[0], *rest])
            if len(left) > 1:
                raise ValueError(f"unexpected argument {left[1]!r}; every setting is written --name=value")
            holder.append(flags.FLAGS["config"].value)
            return left

    def start(_: Sequence[str]) -> None:
        with one_line_errors():
            logging.set_verbosity(logging.WARNING)
            enable_compilation_cache()
            _join()
            main(holder[0])

    app.run(start, flags_parser=parse)


def _join() -> None:
    """Joins the other processes where there are any; says where the run takes place when it is not one CPU."""
    f = flags.FLAGS
    process = parallel.initialize(
        f.distributed,
        f.coordinator,
        f.num_processes,
        f.process_id,
        _device_ids(f.local_devices),
        f.start_timeout,
        announce=lambda text: print(text, file=sys.stderr, flush=True),
    )
    if f.require_platform is not None:
        try:
            parallel.require_platform(f.require_platform)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
    if process.count > 1 or jax.default_backend() != "cpu":
        print(f"process {process.index} of {process.count}: {parallel.topology()}", file=sys.stderr)


def _device_ids(given: Sequence[str] | None) -> list[int] | None:
    if given is None:
        return None
    if not given or not all(number.isdigit() for number in given):
        raise ValueError(f"--local_devices={','.join(given)!r}; expected numbers, such as 0,1")
    return [int(number) for number in given]


def console() -> Console:
    """Standard output, of the first process alone; wide enough for tables where it is no terminal."""
    quiet = jax.process_index() > 0
    plain = Console(quiet=quiet)
    return plain if plain.is_terminal else Console(width=110, quiet=quiet)


def workdir() -> epath.Path:
    """The run directory of the command line.

    Raises:
        ValueError: it is empty.
    """
    if not flags.FLAGS.workdir.strip():
        raise ValueError("--workdir is empty; expected a directory, or leave it out")
    return epath.Path(flags.FLAGS.workdir)


def first_workdir() -> epath.Path:
    """The run directory of a program that all processes run alike: the others write to one that is thrown away."""
    if jax.process_index() == 0:
        return workdir()
    folder = tempfile.mkdtemp(prefix="specjax-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return epath.Path(folder)


def pairs(name: str, given: Sequence[Any]) -> dict[Any, Any]:
    """A config field of pairs, which a command line can write where it cannot add fields, as a dictionary.

    Raises:
        ValueError: it holds something else.
    """
    if not all(isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2 for pair in given):
        raise ValueError(f"{name}={tuple(given)}; expected pairs: ((name or token id, value), ...)")
    return {key: value for key, value in given}


def data_dir() -> epath.Path:
    """The directory of texts and prompts, local or gs://, that SPECJAX_DATA names."""
    return epath.Path(os.environ.get("SPECJAX_DATA", DATA))


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """A context in which an expected error ends the program: one line on stderr, exit code 2.

    Where the same command may go well a second time, after a fault of the network or of a disk, it is 1.
    """
    try:
        yield
    except (flags.Error, *EXPECTED) as error:
        print(f"error: {one_line(error)}{_data_hint(error)}", file=sys.stderr)
        passing = isinstance(error, OSError) and not isinstance(error, LASTING)
        raise SystemExit(1 if passing else 2) from None
    except (AttributeError, KeyError) as error:
        # A field that the config lacks, read by a program that another config was given to.
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        if Path(ml_collections.__file__).parent not in Path(raised_in).parents:
            raise
        print(f"error: the config lacks {one_line(error)}: is it a config of this program?", file=sys.stderr)
        raise SystemExit(2) from None


def one_line(error: BaseException) -> str:
    """What an error says, on one line; of a config file that raised, what it said."""
    text = str(error) or type(error).__name__
    if "Traceback (most recent call last)" in text:
        text = re.sub(r"^\w+(\.\w+)*: ", "", text.strip().splitlines()[-1])
    return " ".join(text.split())


def _data_hint(error: BaseException) -> str:
    """What to do where a file is missing in the directory that is only a guess."""
    if isinstance(error, FileNotFoundError) and "SPECJAX_DATA" not in os.environ and DATA in str(error):
        return "; SPECJAX_DATA is not set: set it to the directory of the texts"
    return ""


def enable_compilation_cache() -> None:
    """Keeps compiled programs for the next run, unless JAX was already told where."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path(JAX_CACHE).expanduser()))


def _define_config(argv: Sequence[str], default: str) -> list[str]:
    """Defines `--config`, after checking file, argument and field names, whose own errors would be tracebacks."""
    rest = list(argv[1:])
    path = next((a.partition("=")[2] for a in rest if re.match(r"--?config=", a)), None)
    if path is None:
        if any(re.fullmatch(r"--?config", a) for a in rest):
            raise ValueError("--config needs a value: --config=<file.py>[:<argument>]")
        path = default
        rest.insert(0, f"--config={path}")
    fields = build.load_config(path)
    for argument in rest:
        if match := re.match(r"--?config\.([^=]+)", argument):
            check_field(fields, match[1])
    config_flags.DEFINE_config_file(
        "config", None, "a file with get_config(arg), `file.py:arg`", lock_config=True, sys_argv=[argv[0], *rest]
    )
    return rest


def check_field(config: ml_collections.ConfigDict, field: str) -> None:
    """Checks that a dotted name exists.

    Raises:
        ValueError: it does not; suggests the nearest and lists its neighbours.
    """
    here, seen = config, ""
    for part in field.split("."):
        name = part.partition("[")[0]
        if not isinstance(here, ml_collections.ConfigDict) or name not in here:
            known = sorted(here) if isinstance(here, ml_collections.ConfigDict) else []
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {seen + close[0]!r}? " if close else ""
            where = f"fields of {seen[:-1]!r}" if seen else "fields"
            raise ValueError(f"unknown config field {field!r}; {hint}{where}: {', '.join(known) or 'none'}")
        here, seen = here[name], f"{seen}{name}."
