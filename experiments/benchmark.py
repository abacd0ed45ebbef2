"""Measures drafters against plain decoding: python -m experiments.benchmark --config=configs/quickstart.py

Writes to the workdir: results.json (rows and where they come from), tokens.json (every token id and time), plot.png,
report.html, config.json. At batch 1 an interrupted run of one process goes on with the next prompt: the same command
again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import ml_collections
from etils import epath
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments import _main
from experiments._identity import identity
from experiments._prompts import prompts_from_config
from specjax import build
from specjax.evaluation import detail_tables, results, tables
from specjax.evaluation.benchmark import Measured, Settings, measure
from specjax.evaluation.contenders import Contender, LoopContender
from specjax.evaluation.figures import plot
from specjax.evaluation.journal import Journal, fingerprint
from specjax.evaluation.prompts import Prompt
from specjax.evaluation.report import ColouredText, page
from specjax.evaluation.rows import DEFINITIONS, summarise
from specjax.evaluation.teacher import Teacher, rounding_bound
from specjax.models import Target, native

# Of the fastest row of each method, in the results' meta.
BEST = ("label", "method", "temperature", "num_nodes", "speedup")


def main(config: ml_collections.ConfigDict) -> None:
    """Loads, measures, writes, prints."""
    console, workdir = _main.console(), _main.first_workdir()
    settings, lineup = build.settings_from_config(config), build.lineup_from_config(config)
    prompts = prompts_from_config(config, console)
    results.check_writable(workdir)
    for label in lineup.left_out:
        console.print(f"row {label!r} is left out: set --config.rows.{label}.source to measure it", style="yellow")
    target = build.placed_target(config)
    bound = rounding_bound(target.config.dtype, config.precision, config.near_tie_bound)
    contenders = build.contenders(lineup, target)
    # Several processes go through all prompts in step.
    resumable = settings.batch == 1 and jax.process_count() == 1
    journal = Journal(workdir / "measured", _about(config, prompts, contenders)) if resumable else None
    if journal is not None and len(journal):
        console.print(f"an interrupted run goes on: {len(journal)} prompts are measured already", highlight=False)
    results.write_json(workdir / "config.json", config.to_dict())

    columns = [TextColumn("{task.description:<52.52}"), BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=what or None)

        measured = measure(contenders, prompts, target, settings, progress, journal)
        progress("scoring the texts", 0, 1)
        teacher = _teacher(contenders)
        rows = summarise(measured, settings, teacher, bound)
        texts = results.texts(measured, teacher)
        coloured = _coloured(config.coloured_texts, contenders, measured, rows, target, settings)

    precision = {
        "dtype": target.config.dtype,
        "matmul": config.precision,
        "layout": config.layout,
        "native_kernel": native.available(),
        "near_tie_bound": bound,
    }
    meta = results.describe(config.to_dict(), precision) | identity(target, settings.template, contenders)
    meta |= {
        "definitions": DEFINITIONS,
        "skipped_prompts": list(measured.skipped_prompts),
        "programs": {i.label: list(p.programs) for i, p in zip(measured.infos, measured.preparations, strict=True)},
        "best": [{k: row[k] for k in BEST} for row in results.best_rows(rows)],
    }
    write(workdir, meta, rows, texts, coloured)
    if journal is not None:
        journal.remove()
    console.print(tables.headline_table(rows))
    if len({row["category"] for row in rows}) > 3:
        console.print(tables.category_table(rows))
    console.print(detail_tables.detail_table(rows))
    if (beside := detail_tables.adaptive_table(rows, config.rows.to_dict())) is not None:
        console.print(beside)
    for line in tables.findings(rows):
        console.print(line, highlight=False)
    if measured.skipped_prompts:
        console.print(f"{len(measured.skipped_prompts)} prompts beyond the context were skipped", style="yellow")
    console.print(f"results, plot and report: {workdir}", highlight=False)


def write(workdir: epath.Path, meta: dict, rows: list[dict], texts: list[dict], coloured: list[ColouredText]) -> None:
    """The run directory's files; results.json last, so that where it is, all is."""
    workdir = epath.Path(workdir)
    results.write_json(workdir / "tokens.json", {"meta": {"schema": meta["schema"]}, "texts": texts})
    (workdir / "plot.png").write_bytes(plot(rows))
    title = f"specjax benchmark: {meta['config']['target']['source']}"
    report = page(meta, rows, title=title, definitions=DEFINITIONS, texts=texts, coloured=coloured)
    (workdir / "report.html").write_text(report)
    results.write_json(workdir / "results.json", {"meta": meta, "rows": rows})


def _about(
    config: ml_collections.ConfigDict, prompts: Sequence[Prompt], contenders: Sequence[Contender]
) -> dict[str, Any]:
    """What figures depend on: a run goes on where all of it is as it was. The target's weights are taken by name."""
    drafters = {c.info.label: fingerprint(c.weights.drafter) for c in contenders if isinstance(c, LoopContender)}
    return {
        "config": config.to_dict(),
        "prompts": [dataclasses.asdict(prompt) for prompt in prompts],
        "drafters": drafters,
        "versions": results.versions(),
        "machine": results.machine(),
        "commit": results.commit(),
    }


def _teacher(contenders: list[Contender]) -> Teacher:
    """Scores texts with the arrays that the contenders already use."""
    first = next(c for c in contenders if isinstance(c, LoopContender))
    return Teacher(
        first.loop.graph,
        first.weights.target,
        precision=first.loop.precision,
        chunk=first.loop.chunk,
        buffer=first.buffer,
    )


def _coloured(
    count: int,
    contenders: list[Contender],
    measured: Measured,
    rows: list[dict],
    target: Target,
    settings: Settings,
) -> list[ColouredText]:
    """First turns of the first prompts, as the best row wrote them, drafted pieces apart."""
    by_label = {info.label: c for info, c in zip(measured.infos, contenders, strict=True)}
    best = [row["label"] for row in results.best_rows(rows) if isinstance(by_label[row["label"]], LoopContender)]
    if not best or settings.batch > 1:
        return []
    contender = by_label[best[0]]
    assert isinstance(contender, LoopContender)
    index = contenders.index(contender)
    info, found = contender.info, []
    for p, prompt in enumerate(measured.prompts[:count]):
        first = measured.turns[index, p][0]
        request = info.request(first.prompt, settings.max_new_tokens, p)
        decoder, pieces = target.tokenizer.stream(), []
        for token, drafted in contender.trace(request):
            if token not in target.eos_ids:
                pieces.append((decoder.push(token), drafted))
        pieces.append((decoder.finish(), False))
        found.append(ColouredText(f"{prompt.id}, {info.label}", prompt.turns[0], tuple(pieces)))
    return found


if __name__ == "__main__":
    _main.run(main, config="configs/quickstart.py", workdir="runs/quickstart")
