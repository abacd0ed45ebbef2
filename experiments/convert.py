"""Carries a trained head from one format to another.

    python -m experiments.convert --from=runs/eagle3 --to=heads/eagle3
    python -m experiments.convert --config=configs/convert.py:path/to/target --from=org/some-EAGLE3-head --to=heads/mine

`--from` takes a run directory, a zoo name, a directory or file of a head, or a repository on the hub; its keys tell its
format. Everything in it is used or reported. Settings: configs/convert.py.
"""

from __future__ import annotations

import json

import ml_collections
from absl import flags
from etils import epath

from experiments import _main
from specjax import build
from specjax.checkpoints.drafters import SavedDrafter, find_drafter
from specjax.checkpoints.formats import OWN, USUAL, read_head, write_head
from specjax.models import Target

flags.DEFINE_string("from", None, "the head to read")
flags.DEFINE_string("to", None, "the directory to write")

# How the head is served, by the other program's documentation; "{}" is the directory, "{target}" the target.
SERVERS = {
    "eagle": {
        "vLLM": """vllm serve {target} --speculative-config '{{"method": "eagle", "model": "{to}", """
        """"num_speculative_tokens": 3}}'""",
        "SGLang": "python -m sglang.launch_server --model {target} --speculative-algorithm EAGLE "
        "--speculative-draft-model-path {to} --speculative-num-steps 3 --speculative-eagle-topk 4 "
        "--speculative-num-draft-tokens 16",
    },
    "eagle3": {
        "vLLM": """vllm serve {target} --speculative-config '{{"method": "eagle3", "model": "{to}", """
        """"num_speculative_tokens": 3}}'""",
        "SGLang": "python -m sglang.launch_server --model {target} --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path {to} --speculative-num-steps 3 --speculative-eagle-topk 4 "
        "--speculative-num-draft-tokens 16",
    },
    "speculators": {"vLLM": "vllm serve {to}"},
    OWN: {"specjax": "python -m experiments.generate --config=configs/generate.py:{to}"},
}


def main(config: ml_collections.ConfigDict) -> None:
    """Reads, writes, reports."""
    source, to = _flag("from"), _flag("to")
    if (epath.Path(to) / "config.json").exists():
        raise ValueError(f"{to} holds a model already: choose another directory, or remove it")
    target = build.target_from_config(config.target)
    drafter = read_head(source, target)
    own = find_drafter(source) is not None
    layout = config.layout or (USUAL.get(drafter.method, OWN) if own else OWN)
    files = write_head(to, drafter, target, layout)
    (epath.Path(to) / "README.md").write_text(card(drafter, target, source, to, layout))
    console = _main.console()
    console.print(f"{source}: {'specjax' if own else drafter.info.get('layout')}, method {drafter.method}")
    for key in ("unused", "config_unused"):
        if drafter.info.get(key):
            console.print(f"not used ({key}): {', '.join(drafter.info[key])}")
    console.print(f"{to}: {layout}, {', '.join([*files, 'README.md'])}")


def _flag(name: str) -> str:
    value = flags.FLAGS[name].value
    if not value:
        raise ValueError(f"--{name} is missing: --from=<a head> --to=<a directory>")
    return str(value)


def card(drafter: SavedDrafter, target: Target, source: str, to: str, layout: str) -> str:
    """A model card: what the head is, how it came to be, how it is served."""
    lines = [
        f"# {drafter.method} head for {target.name}",
        "",
        f"Layout `{layout}`, converted by specjax from `{source}`. It drafts for `{target.name}` (hidden size "
        f"{target.config.hidden_size}, vocabulary {target.config.vocab_size}) and for no other model.",
        "",
    ]
    held_out = drafter.info.get("held_out")
    if held_out:
        lines += ["| held out | |", "|---|---|", *(f"| {k} | {v:.4f} |" for k, v in sorted(held_out.items())), ""]
    commands = SERVERS.get(layout, {})
    if commands:
        lines += ["Served by (as their documentation has it; not tried for this file):", "", "```"]
        lines += [line.format(target=target.name, to=to) for line in commands.values()]
        lines += ["```", ""]
    if drafter.info.get("training"):
        lines += ["Trained with:", "", "```json", json.dumps(drafter.info["training"], indent=2), "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    _main.run(main, config="configs/convert.py")
