"""The cells of an ablation: trained and measured row by row, or decoded with and measured prompt by prompt."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
from etils import epath

from experiments._collections import asked, entries
from experiments._decoding import taus
from specjax import build
from specjax.checkpoints.drafters import save_drafter
from specjax.checkpoints.rundir import RunDirectory, write_whole
from specjax.evaluation import results
from specjax.evaluation.prompts import Prompt
from specjax.models import Target
from specjax.training import Source, Trainer
from specjax.training.data import Answer, Batch, draft_vocabulary, read_answers
from specjax.training.objectives.registry import OBJECTIVES

MEASURED = "measured.json"

Measures = dict[str, list[float | None]]  # by measure, one number a row or prompt; None where a row has no positions


@dataclasses.dataclass(frozen=True, eq=False)
class OneRow:
    """A source of which one row is left.

    Attributes:
        source: all rows.
        index: the row.
    """

    source: Source
    index: int
    rows: int = 1

    def batch(self, rows: np.ndarray) -> Batch:
        """The row, as often as it is asked for."""
        return self.source.batch(np.full(len(rows), self.index))


def training_config(config: ml_collections.ConfigDict, cell: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """The config of a cell's training: the base with what the cell says."""
    made = config.base.to_dict()
    made["objective"] = cell["objective"]
    made["data"] = {**made["data"], **cell.get("data", {})}
    return ml_collections.ConfigDict(made)


def trained(
    config: ml_collections.ConfigDict,
    name: str,
    target: Target,
    folder: epath.Path,
    data_dir: Path,
    report: Callable[[int, int], None] = lambda step, steps: None,
) -> dict[str, Any]:
    """Trains a cell, or goes on with it, and measures it on every held-out row.

    Args:
        config: of the ablations.
        name: of the cell.
        target: loaded.
        folder: of the cell; holds a run, and in the end the measures.
        data_dir: that text paths are relative to.
        report: called with the steps that are done and all.

    Returns:
        `measures` and `tokens`, the positions that carried loss.
    """
    cell = config.cells[name].to_dict()
    of_cell = training_config(config, cell)
    text = data_dir / of_cell.data.text
    if cell.get("human"):
        # Beside the cells: the trainer wants a path that is relative to the data, or absolute.
        written = Path(folder.parent / "human.jsonl").absolute()
        human_text(written, text, [data_dir / path for path in config.human], target)
        of_cell.data.text = str(written)
    trainer = build.build_training(of_cell, target, data_dir)
    if cell.get("human"):
        # The same draft vocabulary as its counterpart: one thing differs.
        vocab = draft_vocabulary(text, target, of_cell.objective.draft_vocab)
        trainer = dataclasses.replace(trainer, tables={"vocab": vocab})
    state = trainer.run(folder, of_cell.to_dict(), report=lambda step, _: report(step, trainer.config.steps))
    params = state.evaluated
    saved = trainer.objective.export(params, trainer.tables, {"step": int(state.step), "held_out": {}})
    save_drafter(folder / "drafter", saved, target)
    rows = RunDirectory(folder).metrics()
    # Not `train/tokens`, which is the loss's weight: heads add up their decays in it.
    logged = [row["train/loss_positions"] for row in rows if "train/loss_positions" in row]
    measures = row_by_row(_measuring(trainer, cell, of_cell, target), params)
    return {"measures": measures, "tokens": float(np.mean(logged)) * trainer.config.steps}


def _measuring(
    trainer: Trainer, cell: Mapping[str, Any], of_cell: ml_collections.ConfigDict, target: Target
) -> Trainer:
    """The trainer, or one with the objective that the cell is measured as."""
    changes = cell.get("measured_as")
    if not changes:
        return trainer
    options = {**of_cell.objective.to_dict(), **changes}
    objective = build.lookup(OBJECTIVES, options.pop("name"), "objective")(target, **options)
    return dataclasses.replace(trainer, objective=objective)


def row_by_row(trainer: Trainer, params: Any) -> Measures:
    """`<set>/<metric>` of every held-out row; None where a row has no position for it."""
    single = dataclasses.replace(trainer.config, batch=1, accumulate=1)
    measures: dict[str, list[float | None]] = {}
    for name, source in trainer.held_out.items():
        alone = {str(i): OneRow(source, i) for i in range(source.rows)}
        found = dataclasses.replace(trainer, config=single, held_out=alone).evaluate(params)
        for key, value in found.items():
            metric = key.partition("/")[2]
            measures.setdefault(f"{name}/{metric}", []).append(None if np.isnan(value) else value)
    return measures


def decoded(
    config: ml_collections.ConfigDict, name: str, head: epath.Path, target: Target, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Decodes greedily with another cell's head.

    Args:
        config: of the ablations.
        name: of the cell.
        head: directory of the trained cell.
        target: loaded.
        prompts: of which the first turn is asked.

    Returns:
        `measures`: tau of every prompt, and `tau/<category>` of those of a category (of MT-bench its eight), None for
        the others; and `nodes`.
    """
    options = config.cells[name].drafter.to_dict()
    drafting = build.make_drafter(options.pop("name"), target, source=str(head / "drafter"), **options)
    tau = taus(target, drafting, prompts, config.max_new_tokens, config.seed)
    kinds = [prompt.subcategory or prompt.category for prompt in prompts]
    measures = {"tau": tau}
    for kind in sorted(set(kinds)):
        measures[f"tau/{kind}"] = [t if own == kind else None for t, own in zip(tau, kinds, strict=True)]
    return {"measures": measures, "nodes": drafting.drafter.num_nodes}


def kept(folder: epath.Path, cell: Mapping[str, Any]) -> dict[str, Any] | None:
    """What was measured before of the very same cell; None where it was not."""
    path = folder / MEASURED
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    return found["found"] if found["cell"] == json.loads(json.dumps(cell)) else None


def keep(folder: epath.Path, cell: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Keeps what was measured of a cell."""
    folder.mkdir(parents=True, exist_ok=True)
    results.write_json(folder / MEASURED, {"cell": cell, "found": found})


def human_text(path: Path, own: Path, references: Sequence[Path], target: Target) -> None:
    """Sees to it that `path` has people's answers, made from these very files; beside it is what it was made from.

    Args:
        path: written where it is not there, see `write_human`.
        own: the target's answers.
        references: published sets.
        target: for its tokenizer.

    Raises:
        ValueError: it is there and was made from something else, or it is not known from what.
    """
    record = path.with_name(f"{path.name}.made_from.json")
    made_from = {
        "text": _hash(own),
        "human": [_hash(reference) for reference in references],
        "tokenizer": target.tokenizer.fingerprint(),
    }
    if path.exists():
        found = json.loads(record.read_text()) if record.exists() else {}
        made_from["tokenizer"] = target.tokenizer.fingerprint_as(found.get("tokenizer"))
        differ = [key for key in made_from if found.get(key) != made_from[key]]
        if differ:
            raise ValueError(
                f"{path} was made from something else ({', '.join(differ)} {'differ' if found else 'not recorded'}): "
                "give another --workdir, or remove the file and the cells that were trained on it"
            )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(epath.Path(record), json.dumps(made_from, indent=2) + "\n")  # First: no answers without it.
    write_human(path, own, references, target)


def write_human(path: Path, own: Path, references: Sequence[Path], target: Target) -> None:
    """Writes people's answers to the prompts that the target answered, one for one.

    Args:
        path: to write.
        own: the target's answers.
        references: published sets, JSONL or JSON lists, with `question` and `answer`, or `instruction`, `input` and
            `response`.
        target: for its tokenizer.

    Raises:
        ValueError: no prompt of the target's text is in the sets.
    """
    known: dict[str, str] = {}
    for reference in references:
        for entry in entries(reference):
            prompt, answered = asked(entry)
            if answered is not None:
                known[prompt] = answered
    lines = []
    for answer in read_answers(own):
        text = known.get(answer.prompt.strip())
        if text is not None:
            ids = (*target.tokenizer.encode(text, add_special=False), target.eos_ids[0])
            human = Answer(answer.source, answer.id, answer.temperature, answer.prompt, ids, text, "stop")
            lines.append(json.dumps(dataclasses.asdict(human)))
    if not lines:
        raise ValueError(f"none of the prompts of {own} is in {', '.join(map(str, references))}; set config.human")
    write_whole(epath.Path(path), "\n".join(lines) + "\n")


def _hash(path: Path) -> str:
    """Sixteen hex digits that stand for a file's content, or for that of a directory's parts."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}: set config.human, config.base.data.text or SPECJAX_DATA")
    files = sorted(path.glob("part-*.jsonl")) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
