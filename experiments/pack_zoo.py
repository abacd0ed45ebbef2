"""Makes a zoo entry of a finished training run.

    python -m experiments.pack_zoo --from=runs/zoo/medusa --to=runs/zoo/entries/smollm2-135m-medusa

An entry is the best checkpoint in bfloat16 (`model.safetensors`, `config.json`), the curve (`metrics.json`) and a card:
the command that trains it again, data and licences, tokens, held-out figures. Paths of this machine are not in it.
Copied to specjax/zoo it is found by its name. Settings: configs/pack_zoo.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags
from etils import epath

from experiments import _main
from specjax import build
from specjax.checkpoints.drafters import CONFIG, find_drafter
from specjax.checkpoints.rundir import RunDirectory, flat, write_whole
from specjax.checkpoints.safetensors import SINGLE, read_header

flags.DEFINE_string("from", None, "run directory")
flags.DEFINE_string("to", None, "directory to write, named as the entry")

# Figures of the card, of each held-out set that has them.
FIGURES = {"match": "agreement", "match_0": "agreement", "alpha": "alpha", "accepted": "accepted"}
STEP, SEEN = "step", "tokens"


def main(config: ml_collections.ConfigDict) -> None:
    """Checks, writes, says how large it is."""
    source, to = (epath.Path(_flag(name)) for name in ("from", "to"))
    if (to / CONFIG).exists():
        raise ValueError(f"{to} holds an entry already: choose another directory, or remove it")
    run, folder = RunDirectory(source), find_drafter(source)
    if not run.claimed or folder is None:
        raise ValueError(f"{source} is no run directory with a trained drafter: give that of experiments.train")
    wanted = run.config()["train"]["steps"]
    if (run.checkpointed or 0) < wanted:
        raise ValueError(
            f"{source} is at step {run.checkpointed} of {wanted}: end the training first, with the same command"
        )
    model = (folder / SINGLE).read_bytes()
    if len(model) > config.max_mib * 2**20:
        raise ValueError(f"the drafter has {len(model) / 2**20:.1f} MiB, and max_mib={config.max_mib}: train a smaller")
    described = json.loads((folder / CONFIG).read_text())
    described["target"]["name"] = config.target.source
    training = published(described["info"]["training"], config.paths)
    described["info"]["training"] = training
    rows = [{k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()} for row in run.metrics()]
    parameters = sum(math.prod(t.shape) for name, t in read_header(folder / SINGLE).items() if "params." in name)
    to.mkdir(parents=True, exist_ok=True)
    (to / "README.md").write_text(card(to.name, config, described, rows, parameters))
    write_whole(to / "metrics.json", json.dumps({"steps": rows}) + "\n")
    write_whole(to / SINGLE, model)
    write_whole(to / CONFIG, json.dumps(described) + "\n")  # Last: where it is, there is all.
    print(f"{to}: {described['method']}, {len(model) / 2**20:.1f} MiB, step {described['info']['step']}")


def _flag(name: str) -> str:
    value = flags.FLAGS[name].value
    if not value:
        raise ValueError(f"--{name} is missing: --from=<a run directory> --to=<a directory>")
    return str(value)


def usual(training: Mapping[str, Any]) -> dict[str, Any]:
    """The config file of an objective as it is, by dotted names; empty where the objective has none of its name."""
    file = Path("configs") / f"{training['objective']['name']}.py"
    if not file.exists():
        return {}
    loaded = build.load_config(str(file), training["target"]["source"])
    return flat(json.loads(json.dumps(loaded.to_dict()))) if "objective" in loaded else {}


def published(training: Mapping[str, Any], paths: Sequence[Sequence[str]] = ()) -> dict[str, Any]:
    """A run's config without paths of the machine it ran on.

    Args:
        training: the config.
        paths: pairs of an absolute path and what stands for it. Others become those of the config file, or, where that
            has none, their last part.
    """
    known = usual(training)

    def named(path: str) -> str:
        """A path with the longest beginning that has a name replaced by it."""
        found = max(
            (pair for pair in paths if Path(path).is_relative_to(pair[0])), key=lambda x: len(x[0]), default=None
        )
        return path if found is None else str(Path(found[1], Path(path).relative_to(found[0])))

    def walk(tree: Any, prefix: str = "") -> Any:
        if isinstance(tree, Mapping):
            return {key: walk(value, f"{prefix}{key}.") for key, value in tree.items()}
        if isinstance(tree, str) and any(Path(part).is_absolute() for part in tree.split(",")):
            parts = [named(part) for part in tree.split(",")]
            if not any(Path(part).is_absolute() for part in parts):
                return ",".join(parts)
            return known.get(prefix[:-1]) or ",".join(Path(part).name for part in tree.split(","))
        return tree

    return walk(training)


def command(training: Mapping[str, Any]) -> list[str]:
    """The command line that trains it, with what differs from the config file."""
    name, known = training["objective"]["name"], usual(training)
    mine = flat(training)
    changed = [f"--config.{key}={_value(mine[key])}" for key in sorted(mine) if mine[key] != known.get(key)]
    start = f"python -m experiments.train --config=configs/{name}.py:{training['target']['source']}"
    return [start, f"--workdir=runs/{name}", *(changed if known else ())]


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f'"{tuple(tuple(v) if isinstance(v, list) else v for v in value)}"'
    return f'"{value}"' if isinstance(value, str) else str(value)


def curve(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, float]]:
    """Held-out figures of each evaluation, with the answer tokens that were seen until then."""
    seen: list[float] = []
    for row in rows:
        seen += [row[key] for key in ("train/loss_positions", "train/tokens") if key in row][:1]
        figures = {
            k: v for k, v in row.items() if k.count("/") == 1 and k.split("/")[1] in FIGURES and "train" not in k
        }
        if figures:
            yield {STEP: row["step"], SEEN: row["step"] * sum(seen) / len(seen) if seen else 0.0, **figures}


def card(
    name: str, config: ml_collections.ConfigDict, described: Mapping[str, Any], rows: Sequence[Any], parameters: int
) -> str:
    """The entry's README."""
    info, shares = described["info"], " and ".join(described["shares"])
    borrowed = f"It borrows the target's {shares} when it is loaded; the rest is in the file (bfloat16). "
    points = list(curve(rows))
    columns = [key for key in points[-1] if key not in (STEP, SEEN)] if points else []
    heads = [f"{key.split('/')[0]} text: {FIGURES[key.split('/')[1]]}" for key in columns]
    table = [
        f"| {' | '.join(['updates', 'answer tokens seen', *heads])} |",
        f"|{'---|' * (2 + len(heads))}",
        *(
            f"| {' | '.join([str(p[STEP]), f'{round(p[SEEN], -3):,.0f}', *(f'{p[key]:.3f}' for key in columns)])} |"
            for p in points
        ),
    ]
    lines = [
        f"# {name}",
        "",
        f"A drafter of method `{described['method']}` with {parameters / 1e6:.1f} M parameters for "
        f"{config.target_name} ({config.target_licence}). {borrowed if shares else ''}A draft never changes what is "
        "generated, only how fast.",
        "",
        f'Load it with `specjax.load_drafter("{name}", target)`, or `--config.drafter.source={name}`.',
        "",
        "## Command",
        "",
        *(f"    {line}" for line in " \\\n      ".join(command(info["training"])).splitlines()),
        "",
        f"The checkpoint of step {info['step']} is the best by `{info['training']['train']['best']}`.",
        "",
        "## Data and licences",
        "",
        f"Answers of {config.target_name} to training prompts: {config.prompts}. {info['rows']:,} packed rows.",
        "",
        "## Held-out acceptance",
        "",
        "Teacher forced, on answers to prompts that were not trained on. `alpha` is the mean of sum min(p, q) at "
        "temperature 1; `accepted` how many tokens of a chain, as far as training unrolls one, are right in a row, a "
        "mean over positions (not tau - 1: decoding passes over accepted ones). `metrics.json` has the whole curve.",
        "",
        *table,
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    _main.run(main, config="configs/pack_zoo.py")
