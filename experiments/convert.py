"""Carries a trained head from one format to another.

    python -m experiments.convert --from=runs/eagle3 --to=heads/eagle3
    python -m experiments.convert --config=configs/convert.py:path/to/target --from=org/some-EAGLE3-head --to=heads/mine

`--from` takes a run directory, a zoo name, a directory or file of a head, or a repository on the hub; its keys tell its
format. Everything in it is used or reported. `--push=owner/name` uploads what was written to the hub. Settings:
configs/convert.py; what reads which layout: docs/exchange.md.
"""

from __future__ import annotations

import jax.numpy as jnp
import ml_collections
from absl import flags
from etils import epath
from huggingface_hub import HfApi, get_token

from experiments import _main
from experiments._card import card, rows_of
from experiments._push import check_push, push
from specjax import build
from specjax.checkpoints.drafters import find_drafter
from specjax.checkpoints.formats import OWN, USUAL, read_head, write_head
from specjax.evaluation.results import read_results

flags.DEFINE_string("from", None, "the head to read")
flags.DEFINE_string("to", None, "the directory to write")
flags.DEFINE_string("push", None, "a repository of the hub, owner/name, that the directory is uploaded to")


def main(config: ml_collections.ConfigDict) -> None:
    """Reads, writes, reports."""
    source, to = _flag("from"), _flag("to")
    if (epath.Path(to) / "config.json").exists():
        raise ValueError(f"{to} holds a model already: choose another directory, or remove it")
    if flags.FLAGS.push:
        check_push(flags.FLAGS.push, get_token())
    target = build.target_from_config(config.target)
    drafter = read_head(source, target)
    own = find_drafter(source) is not None
    layout = config.layout or (USUAL.get(drafter.method, OWN) if own else OWN)
    measured = rows_of(read_results(epath.Path(config.results)), source) if config.results else ()
    files = write_head(to, drafter, target, layout, config.dtype)
    (epath.Path(to) / "README.md").write_text(card(drafter, target, source, to, layout, measured))
    console = _main.console()
    console.print(f"{source}: {'specjax' if own else drafter.info.get('layout')}, method {drafter.method}")
    for key in ("unused", "config_unused"):
        if drafter.info.get(key):
            console.print(f"not used ({key}): {', '.join(drafter.info[key])}")
    stored, written = drafter.info.get("dtype", "bfloat16"), config.dtype or drafter.info.get("dtype", "bfloat16")
    if rounding := [name for name in (target.config.dtype, written) if itemsize(name) < itemsize(stored)]:
        console.print(f"rounded from {stored} to {rounding[-1]}: --config.dtype and --config.target.dtype say so")
    console.print(f"{to}: {layout}, {written}, {', '.join([*files, 'README.md'])}")
    if flags.FLAGS.push:
        console.print(f"pushed: {push(to, flags.FLAGS.push, HfApi())}")


def itemsize(dtype: str) -> int:
    """Bytes of a float."""
    return jnp.dtype(dtype).itemsize


def _flag(name: str) -> str:
    value = flags.FLAGS[name].value
    if not value:
        raise ValueError(f"--{name} is missing: --from=<a head> --to=<a directory>")
    return str(value)


if __name__ == "__main__":
    _main.run(main, config="configs/convert.py")
