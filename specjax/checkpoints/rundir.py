"""A run's directory, local or gs://: its config, its metrics, its checkpoints.

Object stores neither append nor rename, so nothing here needs to: metrics go to numbered JSONL parts, written once.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
from etils import epath

CONFIG, TARGET, METRICS, CHECKPOINTS, PROFILE = "config.json", "target.json", "metrics", "checkpoints", "profile"
# What runs did at a time when a setting did not exist, where that is not nothing.
BEFORE = {
    "objective.beta": 0.5,
    "optimizer.name": "adamw",
    # How the draft writes says nothing where it does not: the share is 0.
    "data.on_policy.every": 50,
    "data.on_policy.prompts": 32,
    "data.on_policy.max_new_tokens": 128,
    "data.on_policy.temperature": 1.0,
    "data.on_policy.batch": 16,
}


class RunDirectory:
    """The one place that knows the layout of a run directory."""

    def __init__(self, path: str | epath.Path):
        """Names a directory; `claim` makes it."""
        self.path = epath.Path(path)

    @property
    def claimed(self) -> bool:
        """Whether it belongs to a config."""
        return (self.path / CONFIG).exists()

    @property
    def checkpoints(self) -> epath.Path:
        """Where checkpoints lie."""
        return self.path / CHECKPOINTS

    @property
    def profile(self) -> epath.Path:
        """Where traces of the profiler lie."""
        return self.path / PROFILE

    def claim(
        self, config: Mapping[str, Any], free: tuple[str, ...] = (), made_for: Mapping[str, str | int] | None = None
    ) -> None:
        """Makes the directory this config's own, or checks that it is.

        A training run's directory in which nothing has come of another config yet, no checkpoint and no file beside
        the metrics of a start, is taken over: a setting that was put right may go where the wrong one failed.

        Args:
            config: nested mapping of JSON values.
            free: dotted fields in which a resumed run may differ.
            made_for: target, tokenizer and data of the run, by names, counts and hashes; None where it has none of
                its own. A directory whose record lacks some, made by an older version, gets them as long as it has no
                checkpoint.

        Raises:
            PermissionError: the directory cannot be written.
            ValueError: it has the work of a run of another config, target, tokenizer or data; lists every field that
                differs. Or it has checkpoints, and no record of what they were made for.
        """
        mine = json.loads(json.dumps(config))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not self.claimed:
                self._write(mine, made_for)
                return
        except OSError as error:
            raise PermissionError(
                f"the workdir {self.path} cannot be written ({error}): give another --workdir"
            ) from error
        old, new, recorded = flat(self.config()), flat(mine), self.made_for()
        known = {k for k in old.keys() | new.keys() if k not in free and not (k not in old and _as_before(k, new[k]))}
        lines = _differences(old, new, known)
        missing = [key for key in made_for or () if key not in recorded]
        if made_for is not None:
            lines += _differences(recorded, made_for, recorded)
        unknown = missing and self.checkpointed is not None
        if unknown:
            lines.append(
                f"  {', '.join(missing)}: run has no record of this in {TARGET} (older versions wrote none); if its "
                f"checkpoints are of this very target and data, put {json.dumps({**(made_for or {}), **recorded})} "
                f"into {self.path / TARGET}"
            )
        if lines and made_for is not None and not self.worked_in:
            if (self.path / METRICS).exists():  # They would be read as this run's.
                (self.path / METRICS).rmtree()
            self._write(mine, made_for)
            return
        if lines:
            raise ValueError(
                f"the workdir {self.path} belongs to a run of another config, target, tokenizer or data"
                f"{', as far as is known' if unknown else ''}:\n"
                + "\n".join(lines)
                + "\ngive another --workdir, or, to resume it, what that run was made with: config, target, and the "
                "data as it was"
            )
        if missing:
            self._record({**recorded, **(made_for or {})})

    def _write(self, config: Mapping[str, Any], made_for: Mapping[str, str | int] | None) -> None:
        self._record(made_for or {})  # First: where there is a config, there is all.
        write_whole(self.path / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")

    def _record(self, made_for: Mapping[str, str | int]) -> None:
        if made_for:
            write_whole(self.path / TARGET, json.dumps(made_for, indent=2) + "\n")

    def check_own(self, config: Mapping[str, Any], free: tuple[str, ...] = ()) -> None:
        """Sees to it, before the first checkpoint, that no other run has taken the directory over since it was claimed.

        Raises:
            ValueError: one has; lists every field that differs.
        """
        old, new = flat(self.config()), flat(json.loads(json.dumps(config)))
        if lines := _differences(old, new, [k for k in old if k in new and k not in free]):
            raise ValueError(
                f"the workdir {self.path} was taken over by a run of another config that was started after this one:\n"
                + "\n".join(lines)
                + "\ngive each its own --workdir"
            )

    def made_for(self) -> dict[str, str | int]:
        """Target, tokenizer and data that the run was claimed for; of an older run some of it, or nothing."""
        path = self.path / TARGET
        return read_record(path) if path.exists() else {}

    @property
    def worked_in(self) -> bool:
        """Whether it holds more than a start leaves: a finished checkpoint, or anything beside config and metrics."""
        left = (CONFIG, TARGET, METRICS, CHECKPOINTS)
        others = (p for p in self.path.iterdir() if p.name not in left and not p.name.startswith("."))
        return self.checkpointed is not None or any(others)

    @property
    def checkpointed(self) -> int | None:
        """Step of the newest finished checkpoint; None where there is none."""
        found = self.checkpoints.iterdir() if self.checkpoints.exists() else ()
        return max((int(p.name) for p in found if p.name.isdigit()), default=None)

    def config(self) -> dict[str, Any]:
        """The config that the directory belongs to.

        Raises:
            FileNotFoundError: it is no run directory.
            ValueError: its record is damaged.
        """
        if not self.claimed:
            raise FileNotFoundError(f"{self.path} is no run directory: it has no {CONFIG}")
        return read_record(self.path / CONFIG)

    def metrics(self) -> list[dict[str, Any]]:
        """All metric rows in order of their parts; rows that a resumed run replaced are dropped."""
        rows: list[dict[str, Any]] = []
        for part in self._parts():
            lines = [json.loads(line) for line in part.read_text().splitlines()]
            start = lines[0]["resumed_from"]
            rows = [row for row in rows if row["step"] <= start] + lines[1:]
        return rows

    def writer(self, resumed_from: int, sinks: Sequence[Sink] = ()) -> MetricsWriter:
        """A writer whose rows replace those after step `resumed_from`, and go to the sinks as well."""
        return MetricsWriter(self.path / METRICS, len(list(self._parts())), resumed_from, sinks)

    def _parts(self) -> Iterator[epath.Path]:
        folder = self.path / METRICS
        yield from sorted(folder.glob("part-*.jsonl")) if folder.exists() else ()


class Sink(Protocol):
    """A further place for metrics, beside the run directory."""

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Takes rows with `step` and values. After an interruption it may be given rows of a step again."""


class MetricsWriter:
    """Collects rows and writes them as one new part at each flush."""

    def __init__(self, folder: epath.Path, part: int, resumed_from: int, sinks: Sequence[Sink] = ()):
        self._folder, self._part, self._start, self._sinks = folder, part, resumed_from, sinks
        self._rows: list[dict[str, Any]] = []
        self._owed: list[list[dict[str, Any]]] = [[] for _ in sinks]

    def write(self, step: int, **values: float | int | str | list[int]) -> None:
        """Adds a row."""
        self._rows.append({"step": step, **values})

    def flush(self) -> None:
        """Writes what was added since the last flush. Of several processes the first alone writes.

        A sink that fails (a service that is down, a full disk) is warned of, and offered the rows again at the next
        flush: they are in the run directory, and training does not end for it.
        """
        if not self._rows or jax.process_index():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        lines = [{"resumed_from": self._start}, *self._rows]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_whole(self._folder / f"part-{self._part:06d}.jsonl", text)
        for i, sink in enumerate(self._sinks):
            self._owed[i] = [*self._owed[i], *self._rows]
            try:
                sink.write(self._owed[i])
            except Exception as error:  # Whatever a service raises.
                warnings.warn(
                    f"{type(sink).__name__} took no metrics up to step {self._rows[-1]['step']} ({error!r}): they are "
                    f"in {self._folder}, and it gets them with the next",
                    stacklevel=2,
                )
            else:
                self._owed[i] = []
        self._part, self._start, self._rows = self._part + 1, self._rows[-1]["step"], []


def write_whole(path: epath.Path, content: str | bytes) -> None:
    """Writes a file that is whole or not there, whenever the process is killed.

    Object stores write so anyway; a local disk does by a rename.
    """
    place = path if is_remote(path) else path.parent / f".{path.name}.tmp"
    if isinstance(content, str):
        place.write_text(content)
    else:
        place.write_bytes(content)
    if place != path:
        place.replace(path)


def read_record(path: epath.Path) -> dict[str, Any]:
    """The JSON object in a file of a run directory.

    Raises:
        ValueError: it is damaged; names the file.
    """
    try:
        found = json.loads(path.read_text())
    except ValueError as error:  # no JSON, or no UTF-8
        raise ValueError(
            f"{path} is damaged ({error}): put it back as it was, or give another run directory"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__}, not an object: put it back as it was")
    return found


def is_remote(path: epath.Path) -> bool:
    """Whether a path is in an object store."""
    return "://" in str(path)


def is_run(config: Mapping[str, Any]) -> bool:
    """Whether the content of a `config.json` is that of a training run."""
    return "model_type" not in config and {"objective", "train"} <= config.keys()


def unfinished(directory: epath.Path) -> str:
    """What is said where a training run is given as a model or a drafter, and has none to give yet."""
    return (
        f"{directory} is the directory of a training run that holds no finished drafter ({directory / 'drafter'} is "
        "not there): let the run come to its end, or resume it"
    )


_ABSENT = "(absent)"


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], fields: Iterable[str]) -> list[str]:
    """A line for each of these fields in which two flat mappings differ."""
    pairs = [(k, old.get(k, _ABSENT), new.get(k, _ABSENT)) for k in sorted(fields)]
    return [f"  {k}: run has {a!r}, now {b!r}" for k, a, b in pairs if a != b]


def _as_before(field: str, value: Any) -> bool:
    """Whether a setting says what was done when it did not exist: nothing, or what `BEFORE` has."""
    return value in (None, "", 0, False, []) or BEFORE.get(field, _ABSENT) == value


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping by dotted names, to say which field of two differs."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found
