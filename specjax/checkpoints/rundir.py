"""A run's directory, local or gs://: its config, its metrics, its checkpoints.

Object stores neither append nor rename, so nothing here needs to: metrics go to numbered JSONL parts, written once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
from etils import epath

CONFIG, METRICS, CHECKPOINTS = "config.json", "metrics", "checkpoints"


class RunDirectory:
    """The one place that knows the layout of a run directory."""

    def __init__(self, path: str | epath.Path):
        """Names a directory; `claim` makes it."""
        self.path = epath.Path(path)

    @property
    def checkpoints(self) -> epath.Path:
        """Where checkpoints lie."""
        return self.path / CHECKPOINTS

    def claim(self, config: Mapping[str, Any], free: tuple[str, ...] = ()) -> None:
        """Makes the directory this config's own, or checks that it is.

        Args:
            config: nested mapping of JSON values.
            free: dotted fields in which a resumed run may differ.

        Raises:
            PermissionError: the directory cannot be written.
            ValueError: it belongs to a run of another config; lists every field that differs.
        """
        mine = json.loads(json.dumps(config))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not (self.path / CONFIG).exists():
                write_whole(self.path / CONFIG, json.dumps(mine, indent=2, sort_keys=True) + "\n")
                return
        except OSError as error:
            raise PermissionError(
                f"the workdir {self.path} cannot be written ({error}): give another --workdir"
            ) from error
        theirs = self.config()
        old, new = _flat(theirs), _flat(mine)
        differ = [
            k
            for k in sorted(old.keys() | new.keys())
            if k not in free and old.get(k, _ABSENT) != new.get(k, _ABSENT) and not (k not in old and _off(new[k]))
        ]
        if differ:
            lines = "\n".join(f"  {k}: there {old.get(k, _ABSENT)!r}, here {new.get(k, _ABSENT)!r}" for k in differ)
            raise ValueError(
                f"the workdir {self.path} belongs to a run of another config:\n{lines}\n"
                "give another --workdir, or the config of that run to resume it"
            )

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


def write_whole(path: epath.Path, text: str) -> None:
    """Writes a file that is whole or not there, whenever the process is killed.

    Object stores write so anyway; a local disk does by a rename.
    """
    if is_remote(path):
        path.write_text(text)
        return
    aside = path.parent / f".{path.name}.tmp"
    aside.write_text(text)
    aside.replace(path)


def is_remote(path: epath.Path) -> bool:
    """Whether a path is in an object store."""
    return "://" in str(path)


_ABSENT = "(absent)"


def _off(value: Any) -> bool:
    """A setting that asks for nothing; a run of a time when it did not exist had it so."""
    return value in (None, "", 0, False, [])


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
