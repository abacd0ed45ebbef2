"""Files of a benchmark's run directory, and what is said about where they came from."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from etils import epath

from specjax.evaluation.benchmark import Measured
from specjax.evaluation.teacher import Teacher
from specjax.verification.registry import LOSSY

SCHEMA = "specjax.benchmark/1"
PACKAGES = ("specjax", "jax", "jaxlib", "flax", "numpy", "ml_dtypes", "transformers", "torch")


def check_writable(workdir: epath.Path) -> None:
    """Makes the run directory and writes to it, so that an hour's work is not lost for want of a place.

    Raises:
        PermissionError: it cannot be made or written.
    """
    probe = workdir / ".writable"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise PermissionError(f"the workdir {workdir} cannot be written ({error}): give another --workdir") from error


def write_json(path: epath.Path, document: Mapping[str, Any]) -> None:
    """Writes a JSON file that is whole or not there: object stores write so anyway, a local disk by a rename.

    Raises:
        ValueError: the document holds NaN or infinity, which JSON has no word for.
    """
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    if "://" in str(path):
        path.write_text(text)
        return
    scratch = path.parent / f".{path.name}.{os.getpid()}"
    scratch.write_text(text)
    scratch.replace(path)


def read_results(path: epath.Path, schemas: Sequence[str] = (SCHEMA,)) -> dict[str, Any]:
    """Reads a results.json.

    Args:
        path: of the file.
        schemas: those that the caller can read.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not JSON, or of another schema.
    """
    if not path.exists():
        raise FileNotFoundError(f"no results at {path}; expected the results.json of a benchmark's run directory")
    try:
        document = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}): run the benchmark again") from error
    schema = document.get("meta", {}).get("schema") if isinstance(document, dict) else None
    if schema not in schemas:
        known = " and ".join(map(repr, schemas))
        raise ValueError(f"{path} has schema {schema!r}, this version reads {known}: run the benchmark again")
    return document


def describe(config: Mapping[str, Any], precision: Mapping[str, Any], schema: str = SCHEMA) -> dict[str, Any]:
    """The `meta` of a results file.

    Args:
        config: what was run.
        precision: dtype of the model, precision of products, and the like.
        schema: of the rows.
    """
    return {
        "schema": schema,
        "command": command(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": machine(),
        "config": config,
        "commit": commit(),
        "precision": precision,
        "peak_memory_bytes": peak_memory(),
    }


def command() -> str | None:
    """The command line of this process, where it runs a module: what makes a file like this one."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return None
    return shlex.join(["python", "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]])


def versions() -> dict[str, str]:
    """Python and the packages that results depend on, where installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Platform, processor and devices; no names of hosts or users."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": cores(),
        "backend": jax.default_backend(),
        "devices": [d.device_kind for d in jax.devices()],
        "processes": jax.process_count(),
    }


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def commit() -> str | None:
    """The checkout's commit, with `+changes.` and their hash where files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
        return run.stdout.strip()

    try:
        changes = git("diff", "HEAD")
        digest = hashlib.sha256(changes.encode()).hexdigest()[:8]
        return git("rev-parse", "HEAD") + (f"+changes.{digest}" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def texts(measured: Measured, teacher: Teacher) -> list[dict[str, Any]]:
    """Every token id that was emitted, with its prompt, counts and times: what all rows are computed from.

    Args:
        measured: see `benchmark.measure`.
        teacher: the target, for the entropies.
    """
    found = []
    for (i, p), turns in measured.turns.items():
        for number, turn in enumerate(turns):
            c = turn.completion
            found.append(
                {
                    "label": measured.infos[i].label,
                    "prompt": measured.prompts[p].id,
                    "category": measured.prompts[p].category,
                    "turn": number,
                    "prompt_tokens": list(turn.prompt),
                    "tokens": list(c.tokens),
                    "finish": c.finish,
                    "steps": c.steps,
                    "emitted": c.emitted,
                    "accepted": c.accepted.tolist(),
                    "reached": c.reached.tolist(),
                    "overlap": c.overlap.tolist(),
                    "target_entropy": teacher.entropy(turn.prompt, c.tokens) if c.tokens else None,
                    "target_top1": teacher.top1(turn.prompt, c.tokens) if c.tokens else None,
                    "prefill_seconds": turn.prefill_seconds,
                    "decode_seconds": turn.decode_seconds,
                    "observed": turn.observed,
                }
            )
    return found


def select(rows: Sequence[Mapping[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    """The rows that have these values."""
    return [dict(row) for row in rows if all(row.get(name) == value for name, value in fields.items())]


def lossy(row: Mapping[str, Any]) -> bool:
    """Whether a row's rule changes the output law: it is no rival of those that keep it."""
    return row["rule"].endswith(LOSSY)


def apart(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows, their labels with the batch size where there are several."""
    if len({row["batch"] for row in rows}) < 2:
        return [dict(row) for row in rows]
    return [{**row, **{k: f"{row[k]}, batch {row['batch']}" for k in ("label", "baseline")}} for row in rows]


def best_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The fastest lossless row over all prompts of each drafting method, temperature and batch size, fastest first."""
    best: dict[tuple[str, float, int], Mapping[str, Any]] = {}
    for row in select(rows, category="all"):
        key = row["method"], row["temperature"], row["batch"]
        if row["num_nodes"] and row["speedup"] is not None and not lossy(row):
            if key not in best or row["speedup"] > best[key]["speedup"]:
                best[key] = row
    return sorted((dict(row) for row in best.values()), key=lambda row: -row["speedup"])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
