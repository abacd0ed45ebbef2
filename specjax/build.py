"""From names and configs to objects: the only file of the library that reads the fields of a ConfigDict.

Names are looked up in the registries beside the methods (`specjax.drafting.registry`, `specjax.verification.registry`,
`specjax.training.objectives.registry`). A name of the form `package.module:maker` reaches a user's own code.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections
from etils import epath

from specjax import checkpoints
from specjax.checkpoints import drafters
from specjax.checkpoints.rundir import RunDirectory
from specjax.checkpoints.train_state import run_params
from specjax.config_files import config_module, load_config, override
from specjax.decoding import Drafter, Loop, Rule, Sampling, Weights, check_precision, make_sampling
from specjax.drafting.lookup import lookup
from specjax.drafting.make import make_drafter
from specjax.drafting.registry import DRAFTERS, Drafting
from specjax.evaluation.benchmark import Settings
from specjax.evaluation.contenders import Contender
from specjax.evaluation.lineup import Lineup, enlist
from specjax.models import Target, pack
from specjax.models.tokenizer import Tokenizer
from specjax.parallel import describe, make_placement
from specjax.training import (
    Document,
    HiddenStates,
    OptimizerConfig,
    Source,
    StoreConfig,
    Trainer,
    TrainerConfig,
)
from specjax.training.data import answers_at, draft_vocabulary, most_frequent, text_rows
from specjax.training.identity import target_identity
from specjax.training.objectives import Distill, Objective
from specjax.training.objectives.registry import OBJECTIVES
from specjax.training.on_policy import OnPolicy, OnPolicyConfig
from specjax.training.online import online_taps
from specjax.training.user_data import DatasetConfig, DatasetRows, dataset_rows
from specjax.verification import Block, Speculative
from specjax.verification.registry import RULES, is_lossy


def default_rule(drafter: Drafter, sampling: Sampling) -> str:
    """The exact token-by-token rule that fits; `block` and `traversal` may accept more of drawn drafts."""
    if sampling.greedy:
        return "greedy"
    return "one_hot" if drafter.kind(sampling) == "fixed" else "recursive"


def make_rule(
    name: str | None,
    drafter: Drafter,
    sampling: Sampling,
    *,
    lossless: bool = True,
    options: Mapping[str, Any] | None = None,
) -> Rule:
    """A rule that fits the drafter's drafts.

    Args:
        name: registered, or None for the default.
        drafter: gives depth and kind of draft.
        sampling: gives the statics that the kind depends on.
        lossless: refuse a rule that changes the output law.
        options: of the rule, a threshold for instance.

    Raises:
        ValueError: unknown rule or option, one that is not exact here, a lossy one where `lossless` is set (names the
            rule to use), or a maker that makes no rule.
    """
    fitting = default_rule(drafter, sampling)
    name, kind = name or fitting, drafter.kind(sampling)
    where = "at temperature 0" if sampling.greedy else "at temperature > 0"
    maker = lookup(RULES, name, "rule")
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(
            f"rule_options={options!r} of rule {name!r}; expected options by name, as in {{'epsilon': 0.2}}"
        )
    if own := {"depth", "exact_for"} & set(options or ()):
        raise ValueError(f"rule {name!r} does not take the option {min(own)!r}: that is its own to say")
    try:
        rule: Rule = maker(drafter.depth, **(options or {}))
    except TypeError as error:
        fields = [field.name for field in dataclasses.fields(maker)] if dataclasses.is_dataclass(maker) else []
        takes = ", ".join(field for field in fields if field not in ("depth", "exact_for"))
        known = f"; it takes {takes}" if takes else ""
        raise ValueError(f"rule {name!r} does not take these options ({options}): {error}{known}") from error
    if isinstance(rule, type) or not (hasattr(rule, "verify") and hasattr(rule, "exact_for")):
        raise ValueError(
            f"rule {name!r} makes a {type(rule).__name__}; expected maker(depth, **options) to return a rule, with "
            "verify and exact_for"
        )
    instead = {Block: "traversal", Speculative: "recursive"}.get(type(rule))
    if instead and drafter.num_nodes > drafter.depth:
        raise ValueError(f"rule {name!r} verifies chains, not a tree of {drafter.num_nodes} nodes; use {instead!r}")
    if is_lossy(rule):
        if lossless:
            raise ValueError(
                f"rule {name!r} is lossy; use {fitting!r}, or set lossless=False beside it to let it run all the same"
            )
    elif kind not in rule.exact_for or (name == "greedy" and not sampling.greedy):
        raise ValueError(f"rule {name!r} is not exact for a {kind!r} draft {where}; use {fitting!r}")
    return rule


def make_loop(
    target: Target,
    drafting: Drafting,
    sampling: Sampling,
    *,
    rule: str | None = None,
    rule_options: Mapping[str, Any] | None = None,
    lossless: bool = True,
    precision: str = "float32",
    layout: str = "plain",
) -> tuple[Loop, Weights]:
    """The compiled program's statics and its arrays.

    Args:
        target: what to decode with.
        drafting: how to draft.
        sampling: the rows' parameters; only its statics matter here.
        rule: registered name, or None for the default.
        rule_options: of the rule.
        lossless: refuse a rule that changes the output law.
        precision: `float32` for full float32 products, `default` for the platform's.
        layout: `plain`, or `packed` for decoding few rows on a CPU (see `specjax.models.linear`).

    Raises:
        ValueError: a drafter that was made for another target, an unknown layout or precision, or a rule that does not
            fit.
    """
    check_precision(precision)
    drafting.check_target(target)
    check_layout(layout, target)
    loop = Loop(
        graph=target.graph,
        drafter=drafting.drafter,
        rule=make_rule(rule, drafting.drafter, sampling, lossless=lossless, options=rule_options),
        eos=target.eos_ids,
        precision=precision,
    )
    lay = pack if layout == "packed" else (lambda tree: tree)
    return loop, Weights(lay(target.params), lay(drafting.params), drafting.tables)


def check_layout(layout: str, target: Target) -> None:
    """Checks a layout of the weights.

    Raises:
        ValueError: it is unknown, or does not go with where the target lies.
    """
    if layout not in ("plain", "packed"):
        raise ValueError(f"layout={layout!r}; expected 'plain' or 'packed'")
    if layout == "packed" and target.placement is not None:
        raise ValueError(
            "layout='packed' is for one CPU device, and the target lies on a mesh of "
            f"{describe(target.placement.mesh)}; use layout='plain'"
        )


def drafter_from_config(config: ml_collections.ConfigDict, target: Target) -> Drafting:
    """`config.name` and its options; further keys of the row (rule, label) are not the maker's."""
    options = config.to_dict()
    name = options.pop("name")
    return make_drafter(name, target, **options)


def target_from_config(config: ml_collections.ConfigDict) -> Target:
    """`config.source` and `config.dtype`."""
    return checkpoints.load_target(config.source, dtype=config.get("dtype", "float32"))


def placed_target(config: ml_collections.ConfigDict, devices: Sequence[jax.Device] | None = None) -> Target:
    """`config.target` with its parameters where `config.mesh`, if there is one, puts them: read into their shards.

    Args:
        config: with `target`, and `mesh` or none.
        devices: of the mesh; those of all processes by default.
    """
    mesh, dtype = config.mesh.to_dict() if "mesh" in config else None, config.target.get("dtype", "float32")
    return checkpoints.load_target(config.target.source, dtype=dtype, mesh=mesh, devices=devices)


# ---- Training ----


def build_training(config: ml_collections.ConfigDict, target: Target, data_dir: Path | epath.Path) -> Trainer:
    """The trainer that a config describes.

    Args:
        config: see configs/distill.py.
        target: loaded.
        data_dir: that text paths are relative to, local or gs://.

    Raises:
        FileNotFoundError: text or store is missing.
        ValueError: an option is unknown or out of range, or a store belongs to another target.
    """
    options = config.objective.to_dict()
    name = options.pop("name")
    objective = lookup(OBJECTIVES, name, "objective")(target, **options)
    data = config.data
    online = online_taps(objective, data.taps) if data.get("online") else None
    if "dataset" in data:
        found = dataset_from_config(data, target.tokenizer)
        train: Source = found.train
        held_out: dict[str, Source] = {"held_out": found.held_out}
        vocab = most_frequent(found.answer_tokens, options["draft_vocab"], target.eos_ids)
    else:
        if "store" in data and online is None:
            train = HiddenStates(data.store.split(","), target, max_shards=data.max_shards or None)
            held_out = {k: HiddenStates(path, target) for k, path in data.held_out.items()}
        else:
            # A negative temperature takes every answer.
            wanted = data.temperature if data.temperature >= 0 else None
            sources = tuple(data.get("sources", ()))
            train = text_rows(data_dir / data.text, target, data.row_length, wanted, sources=sources)
            held_out = {
                k: text_rows(data_dir / data.held_out_text, target, data.row_length, t, data.held_out_rows)
                for k, t in {"greedy": 0.0, "sampled": 1.0}.items()
            }
        vocab = draft_vocabulary(data_dir / data.text, target, options["draft_vocab"])
    placement = make_placement(config.mesh.to_dict(), target.config.head_dim)
    if placement is None and jax.process_count() > 1:
        raise ValueError(
            f"config.mesh is of one device, and this is a run of {jax.process_count()} processes, which would each "
            "train alone: spread it, for instance with --config.mesh.data=-1"
        )
    tables = {"vocab": vocab}
    on_policy = data.get("on_policy")
    writer = on_policy_from_config(data, objective, target, data_dir) if on_policy and on_policy.share else None
    return Trainer(
        target=target.placed(placement),
        objective=objective,
        tables=tables if placement is None else placement.everywhere(tables),
        optimizer=OptimizerConfig(**config.optimizer.to_dict()),
        config=TrainerConfig(**config.train.to_dict()),
        train=train,
        held_out=held_out,
        placement=placement,
        online=online,
        on_policy=writer,
    )


def on_policy_from_config(
    data: ml_collections.ConfigDict, objective: Objective, target: Target, data_dir: Path
) -> OnPolicy:
    """The draft as a writer of training text, from `data.on_policy` and the prompts of `data.text`.

    Raises:
        ValueError: the draft of this objective does not write by itself, or a setting is out of range.
    """
    if not isinstance(objective, Distill):
        raise ValueError(
            f"data.on_policy.share={data.on_policy.share}: on-policy text is written by a draft that is a decoder of "
            "its own and taught by the target; it goes with the objective 'distill' alone"
        )
    if "dataset" in data:
        raise ValueError("data.on_policy continues the prompts of data.text; leave out data.dataset, or share=0")
    wanted = data.temperature if data.temperature >= 0 else None
    documents = answers_at(data_dir / data.text, target, wanted)
    prompts = dict.fromkeys(tuple(d.tokens[: d.prompt_length].tolist()) for d in documents)
    config = OnPolicyConfig(**data.on_policy.to_dict(), row_length=data.row_length)
    return OnPolicy(config, objective.student, tuple(prompts))


def dataset_from_config(data: ml_collections.ConfigDict, tokenizer: Tokenizer) -> DatasetRows:
    """The packed rows of `data.dataset`."""
    return dataset_rows(
        DatasetConfig(**data.dataset.to_dict()),
        tokenizer,
        row_length=data.row_length,
        held_out_rows=data.held_out_rows,
        cache=data.cache or None,
    )


def best_params(run: str | epath.Path) -> tuple[int, dict[str, float], Any]:
    """Step, held-out metrics and trained parameters of the best checkpoint of a training run."""
    directory = RunDirectory(run)
    return run_params(directory.checkpoints, directory.config()["train"]["best"])


def start_of(config: ml_collections.ConfigDict, target: Target, run: str | epath.Path) -> Callable[[], Any] | None:
    """What a fresh run starts from: the parameters of `config.init_from`; None for the objective's own start.

    Args:
        config: of the run.
        target: of the run.
        run: its directory. A run that has a checkpoint goes on from that, whether its start is still there or not.

    Raises:
        FileNotFoundError: `init_from` is no run directory, or has no checkpoint yet.
        ValueError: as for `params_of`.
    """
    if not (source := config.get("init_from", "")):
        return None
    if RunDirectory(run).checkpointed is None:
        RunDirectory(source).config()
        if RunDirectory(source).checkpointed is None:
            raise FileNotFoundError(f"init_from={source!r} has no finished checkpoint: give a run that was trained")
    return params_of(source, target)


def params_of(run: str | epath.Path, target: Target) -> Callable[[], Any]:
    """The best parameters of another run, to start from; read when called, which a resumed run has no need of.

    Whom they were made for is looked up at once. A run of an older version that has no record of it is said so of, and
    taken.

    Raises:
        ValueError: they were trained for another architecture or tokenizer; names what differs.
    """
    directory = RunDirectory(run)
    theirs = directory.made_for()
    mine = target_identity(target, theirs)
    wanted = ("target_config", "tokenizer")
    differ = [key for key in wanted if key in theirs and theirs[key] != mine[key]]
    if differ:
        lines = "; ".join(f"{key}: that run has {theirs[key]!r}, here {mine[key]!r}" for key in differ)
        raise ValueError(
            f"init_from={str(run)!r} is a run for another target, {theirs.get('target')!r}, not for {target.name!r} "
            f"({lines}): give a run that trained for this one, or leave init_from empty"
        )
    unknown = [key for key in wanted if key not in theirs]
    if unknown and directory.path.exists():
        warnings.warn(
            f"init_from={str(run)!r} has no record of the target that it was trained for ({', '.join(unknown)}; older "
            "versions wrote none): whether its parameters belong to this one is not checked",
            stacklevel=2,
        )
    return lambda: best_params(run)[2]


def export_drafter(config: ml_collections.ConfigDict, target: Target, trainer: Trainer, run: str | epath.Path) -> int:
    """Writes the best checkpoint of a run as a drafter, to `drafter/` within it; for one of several processes alone.

    Args:
        config: that the run was made with.
        target: what it was trained for.
        trainer: built from the config.
        run: run directory.

    Returns:
        The checkpoint's step.
    """
    step, metrics, params = best_params(run)
    info = {"step": step, "rows": trainer.train.rows, "held_out": metrics, "training": config.to_dict()}
    saved = trainer.objective.export(params, trainer.tables, info)
    drafters.save_drafter(RunDirectory(run).path / "drafter", saved, target)
    return step


def regeneration_loop(config: ml_collections.ConfigDict, target: Target, temperature: float) -> tuple[Loop, Weights]:
    """The loop that answers prompts at one temperature with `config.drafter` and its exact rule."""
    drafting = drafter_from_config(config.drafter, target)
    return make_loop(target, drafting, make_sampling([temperature]), layout=config.layout)


def store_parts(
    config: ml_collections.ConfigDict, target: Target, data_dir: Path | epath.Path
) -> dict[str, tuple[list[Document], StoreConfig, int | None]]:
    """The hidden-state stores that a config describes: by name the text, how to store it, and the shard limit."""
    parts = {}
    for name, part in config.parts.items():
        documents = answers_at(data_dir / part.text, target, part.temperature if part.temperature >= 0 else None)
        store = StoreConfig(**config.store.to_dict(), shard_rows=part.shard_rows)
        parts[name] = (documents, store, part.max_shards or None)
    return parts


# ---- Measuring ----


def settings_from_config(config: ml_collections.ConfigDict) -> Settings:
    """How to measure."""
    return Settings(**_fields_of(Settings, config))


def lineup_from_config(config: ml_collections.ConfigDict) -> Lineup:
    """What to compare."""
    return Lineup(**_fields_of(Lineup, config))


def contenders(lineup: Lineup, target: Target) -> list[Contender]:
    """See `specjax.evaluation.lineup.enlist`."""
    return enlist(lineup, target, make_drafter=make_drafter, make_loop=make_loop, default_rule=default_rule)


def _fields_of(settings: type, config: ml_collections.ConfigDict) -> dict[str, Any]:
    fields = dataclasses.fields(settings)
    given = {field.name: config.to_dict()[field.name] for field in fields if field.name in config}
    needed = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [name for name in needed if name not in given]:
        raise ValueError(f"the config lacks {missing[0]!r}: is it a config of this program?")
    return given


__all__ = [
    "DRAFTERS",
    "OBJECTIVES",
    "RULES",
    "Drafting",
    "best_params",
    "build_training",
    "check_layout",
    "config_module",
    "contenders",
    "dataset_from_config",
    "default_rule",
    "drafter_from_config",
    "export_drafter",
    "lineup_from_config",
    "load_config",
    "lookup",
    "make_drafter",
    "make_loop",
    "make_rule",
    "override",
    "params_of",
    "placed_target",
    "regeneration_loop",
    "settings_from_config",
    "start_of",
    "store_parts",
    "target_from_config",
]
