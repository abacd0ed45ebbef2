"""Cards of heads: what a head is, what was measured of it, and which programs serve it, by what command.

Commands are those that the programs' own sources ask for; docs/exchange.md says what was read and what was run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.checkpoints.drafters import SavedDrafter
from specjax.checkpoints.formats import OWN
from specjax.checkpoints.sources import ALIASES, published_name
from specjax.models import Target
from specjax.models.eagle import default_taps

CHAIN = 3  # tokens that the commands draft
MTP = "No server loads such modules apart from their target: they belong in a checkpoint of the target."
# What is said of a layout that no server reads.
UNSERVED = {
    "eagle": "SGLang has another architecture name for EAGLE-1 heads: write the layout `eagle-sglang` for it.",
    "eagle-sglang": "vLLM has another architecture name for EAGLE-1 heads: write the layout `eagle` for it.",
    "hydra": "vLLM, SGLang and llama.cpp have no Hydra. Its authors' program (zankner/Hydra) loads "
    "`hydra_lm_head.pt`, the same tensors saved by torch.",
    "medusa": "vLLM, SGLang and llama.cpp do not read these names: write the layout `medusa-vllm` for vLLM. These are "
    "those of the authors' program (FasterDecoding/Medusa), which loads `medusa_lm_head.pt`, the same tensors saved by "
    "torch.",
    "mtp-deepseek": MTP,
    "mtp-mimo": MTP,
    "mtp-qwen3-next": MTP,
}


def card(
    drafter: SavedDrafter,
    target: Target,
    source: str,
    to: str,
    layout: str,
    measured: Sequence[Mapping[str, Any]] = (),
) -> str:
    """A model card.

    Args:
        drafter: the head.
        target: that it belongs to.
        source: what it was converted from.
        to: where it lies, for the commands.
        layout: that it is written in.
        measured: rows of a benchmark of this head (`experiments.benchmark`).
    """
    model = published_name(target.name)
    made = f" (loaded as `{target.name}`, which is made from it)" if model != target.name else ""
    lines = [
        f"# {drafter.method} head for {model}",
        "",
        f"Layout `{layout}`, converted by specjax from `{source}`. It drafts for `{model}`{made} (hidden size "
        f"{target.config.hidden_size}, vocabulary {target.config.vocab_size}) and for no other model.",
        "",
        *_figures(drafter.info, measured),
    ]
    commands = served_by(drafter, target, to, layout)
    if commands:
        lines += ["Served by (by the programs' sources; not tried for this file):", "", "```"]
        lines += [line for name, command in commands.items() for line in (f"# {name}", *command)]
        lines += ["```", ""]
    if layout in UNSERVED:
        lines += [UNSERVED[layout], ""]
    if drafter.info.get("training"):
        lines += ["Trained with:", "", "```json", json.dumps(drafter.info["training"], indent=2), "```", ""]
    return "\n".join(lines)


def served_by(drafter: SavedDrafter, target: Target, to: str, layout: str) -> dict[str, list[str]]:
    """Program -> the commands with which it serves a head of this layout; nothing where none does."""
    model, config = published_name(target.name), drafter.config
    commands: dict[str, list[str]] = {}
    if layout == OWN:
        named = "" if ALIASES.get(target.name) else f" --config.target.source={target.name}"
        return {"specjax": [f"python -m experiments.generate --config=configs/generate.py:{to}{named}"]}
    # vLLM's projection of EAGLE-1 has no bias, and its loader raises for one.
    if layout in ("eagle3", "medusa-vllm") or (layout == "eagle" and not config.bias):
        method = "medusa" if layout == "medusa-vllm" else layout
        tokens = config.num_heads if method == "medusa" else CHAIN
        said = json.dumps({"method": method, "model": to, "num_speculative_tokens": tokens})
        commands["vLLM"] = [f"vllm serve {model} --speculative-config '{said}'"]
    if layout == "speculators":
        commands["vLLM"] = [f"vllm serve {to}"]
    if layout in ("eagle3", "eagle-sglang"):
        commands["SGLang"] = [
            f"python -m sglang.launch_server --model {model} --speculative-algorithm "
            f"{'EAGLE3' if layout == 'eagle3' else 'EAGLE'} --speculative-draft-model-path {to} "
            f"--speculative-num-steps {CHAIN} --speculative-eagle-topk 1 --speculative-num-draft-tokens {CHAIN + 1}"
        ]
    if layout in ("eagle3", "speculators"):
        layers = target.config.num_layers
        usual = layers >= 6 and config.taps == default_taps(layers)
        # Converters before the change that reads `eagle_config` take the usual layers whatever a config says.
        warning = [] if usual else ["# (a converter that reads eagle_config: others take layers 2, n // 2, n - 3)"]
        commands["llama.cpp"] = [
            *warning,
            f"python convert_hf_to_gguf.py {to} --target-model-dir <directory of {model}> --outfile head.gguf",
            f"llama-server -m <{model} as gguf> -md head.gguf --spec-type draft-eagle3 --spec-draft-n-max {CHAIN}",
        ]
    return commands


def _figures(info: Mapping[str, Any], measured: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tables of what was measured, in decoding and in training; nothing where nothing was."""
    lines: list[str] = []
    if measured:
        lines += ["| measured in decoding | T | tau | alpha | speedup | prompts |", "|---|---|---|---|---|---|"]
        for row in measured:
            figures = " | ".join(_with_interval(row, name) for name in ("tau", "alpha", "speedup"))
            lines += [f"| {row['label']} | {row['temperature']:g} | {figures} | {row['prompts']} |"]
        lines += ["", "tau is the mean acceptance length, bonus token included; in brackets 95% intervals.", ""]
    held_out = info.get("held_out")
    if held_out:
        lines += ["| held out, teacher forced | |", "|---|---|"]
        lines += [f"| {name} | {value:.4f} |" for name, value in sorted(held_out.items())]
        lines += [
            "",
            "Means over positions; decoding passes over those that it has accepted, so none of them is tau.",
            "",
        ]
    return lines


def _with_interval(row: Mapping[str, Any], name: str) -> str:
    value, interval = row[name], row.get(f"{name}_ci")
    if value is None:
        return ""
    return f"{value:.2f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def rows_of(results: Mapping[str, Any], source: str) -> list[Mapping[str, Any]]:
    """The rows over all prompts that a benchmark measured of one head.

    Args:
        results: content of a results.json.
        source: zoo entry, run directory or path, as the benchmark's rows have it.

    Raises:
        ValueError: it measured no such head.
    """
    configured = results["meta"]["config"].get("rows", {})
    names = [name for name, row in configured.items() if isinstance(row, Mapping) and row.get("source") == source]
    rows = [row for row in results["rows"] if row["category"] == "all" and _named(row["label"], names)]
    if not rows:
        known = sorted(
            {str(row["source"]) for row in configured.values() if isinstance(row, Mapping) and "source" in row}
        )
        raise ValueError(
            f"the results hold no row of {source!r}; they have {', '.join(known) or 'no trained drafters'}"
        )
    return rows


def _named(label: str, names: Sequence[str]) -> bool:
    return any(label == name or label.startswith(f"{name} ") for name in names)
