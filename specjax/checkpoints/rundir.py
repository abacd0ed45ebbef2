"""A run's directory, local or gs://: its config, its metrics, its checkpoints.

Object stores neither append nor rename, so nothing here needs to: metrics go to numbered JSONL parts, written once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
from etils import epath

CONFIG, TARGET, METRICS, CHECKPOINTS, PROFILE = "config.json", "target.json", "metrics", "checkpoints", "profile"


class RunDirectory:
    """The one place that knows the layout of a run directory."""

    def __init__(self, path: str | epath.Path):
        """Names a directory; `claim` makes it."""
        self.path = epath.Path(path)

    @property
    def checkpoints(self) -> epath.Path:
        """Where checkpoints lie."""
        return self.path / CHECKPOINTS

    @property
    def profile(self) -> epath.Path:
        """Where traces of the profiler lie."""
        return self.path / PROFILE

    def claim(
        self, config: Mapping[str, Any], free: tuple[str, ...] = (), made_for: Mapping[str, str] | None = None
    ) -> None:
        """Makes the directory this config's own, or checks that it is.

        Args:
            config: nested mapping of JSON values.
            free: dotted fields in which a resumed run may differ.
            made_for: target and tokenizer of the run, by names and hashes; None where it has none of its own. A
                directory without a record of them, made by an older version, gets one as long as it has no checkpoint.

        Raises:
            PermissionError: the directory cannot be written.
            ValueError: it belongs to a run of another config, target or tokenizer; lists every field that differs. Or
                it has checkpoints, and no record of what they were made for.
        """
        mine = json.loads(json.dumps(config))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not (self.path / CONFIG).exists():
                self._record(made_for)  # First: where there is a config, there is all.
                write_whole(self.path / CONFIG, json.dumps(mine, indent=2, sort_keys=True) + "\n")
                return
        except OSError as error:
            raise PermissionError(
                f"the workdir {self.path} cannot be written ({error}): give another --workdir"
            ) from error
        old, new, recorded = _flat(self.config()), _flat(mine), self._recorded()
        known = {k for k in old.keys() | new.keys() if k not in free and not (k not in old and _off(new[k]))}
        lines = _differences(old, new, known)
        if made_for is not None and recorded is not None:
            lines += _differences(recorded, made_for, recorded.keys() | made_for.keys())
        unknown = made_for is not None and recorded is None and self._has_checkpoints()
        if unknown:
            lines.append(
                f"  {', '.join(made_for or ())}: run has no record of them, {TARGET} is missing (older versions wrote "
                f"none); if its checkpoints are of this very target, put {json.dumps(made_for)} into "
                f"{self.path / TARGET}"
            )
        if lines:
            raise ValueError(
                f"the workdir {self.path} belongs to a run of another config, target or tokenizer"
                f"{', as far as is known' if unknown else ''}:\n"
                + "\n".join(lines)
                + "\ngive another --workdir, or what that run was made with to resume it"
            )
        if recorded is None:
            self._record(made_for)

    def _record(self, made_for: Mapping[str, str] | None) -> None:
        if made_for is not None:
            write_whole(self.path / TARGET, json.dumps(made_for, indent=2) + "\n")

    def _recorded(self) -> dict[str, str] | None:
        path = self.path / TARGET
        return json.loads(path.read_text()) if path.exists() else None

    def _has_checkpoints(self) -> bool:
        return self.checkpoints.exists() and any(p.name.isdigit() for p in self.checkpoints.iterdir())

    def config(self) -> dict[str, Any]:
        """The config that the directory belongs to.

        Raises:
            FileNotFoundError: it is no run directory.
        """
        if not (self.path / CONFIG).exists():
            raise FileNotFoundError(f"{self.path} is no run directory: it has no {CONFIG}")
        return json.loads((self.path / CONFIG).read_text())

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

    def write(self, step: int, **values: float | int | str | list[int]) -> None:
        """Adds a row."""
        self._rows.append({"step": step, **values})

    def flush(self) -> None:
        """Writes what was added since the last flush. Of several processes the first alone writes."""
        if not self._rows or jax.process_index():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        lines = [{"resumed_from": self._start}, *self._rows]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_whole(self._folder / f"part-{self._part:06d}.jsonl", text)
        for sink in self._sinks:
            sink.write(self._rows)
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


def is_remote(path: epath.Path) -> bool:
    """Whether a path is in an object store."""
    return "://" in str(path)


_ABSENT = "(absent)"


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], fields: Iterable[str]) -> list[str]:
    """A line for each of these fields in which two flat mappings differ."""
    pairs = [(k, old.get(k, _ABSENT), new.get(k, _ABSENT)) for k in sorted(fields)]
    return [f"  {k}: run has {a!r}, now {b!r}" for k, a, b in pairs if a != b]


def _off(value: Any) -> bool:
    """A setting that asks for nothing; a run of a time when it did not exist had it so."""
    return value in (None, "", 0, False, [])


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
