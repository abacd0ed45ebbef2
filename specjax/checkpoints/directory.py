"""Hugging Face model directories, local or gs://: read into targets, and written so that transformers loads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from etils import epath

from specjax.checkpoints import names
from specjax.checkpoints.rundir import is_run, unfinished
from specjax.checkpoints.safetensors import open_directory, write_directory
from specjax.models import graph
from specjax.models.config import ModelConfig
from specjax.models.families import config_from_hf, config_to_hf
from specjax.models.json_files import read_object
from specjax.models.target import Target, config_hash
from specjax.models.tokenizer import Tokenizer
from specjax.parallel import make_placement


def from_directory(
    directory: epath.PathLike,
    *,
    dtype: str = "float32",
    name: str | None = None,
    mesh: Mapping[str, Any] | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Target:
    """Loads a Hugging Face directory, local or `gs://`; arguments and errors as for `load_target`."""
    directory = epath.Path(directory)
    if not (directory / "config.json").exists():
        raise FileNotFoundError(f"no such model: {directory} has no config.json")
    hf = read_object(directory / "config.json")
    if is_run(hf):
        raise ValueError(unfinished(directory))
    try:
        config = config_from_hf(hf, dtype)
    except ValueError as error:
        raise ValueError(f"{directory / 'config.json'}: {error}") from error
    tensors = open_directory(directory)
    tokenizer = Tokenizer.from_directory(directory)
    placement = make_placement(mesh or {}, config.head_dim, devices)
    static, shapes = graph(config)
    places = None if placement is None else placement.target_shardings(shapes)
    return Target(
        config=config,
        graph=static,
        params=names.load_params(config, tensors, places),
        tokenizer=tokenizer,
        name=name or str(directory),
        config_hash=config_hash(config),
        eos_ids=tokenizer.eos_ids,
        context=config.max_position,
        placement=placement,
    )


def save_target(target: Target, directory: epath.PathLike) -> None:
    """Writes a target as a Hugging Face directory that transformers loads: weights, config, tokenizer.

    Raises:
        ValueError: its config is one that no Hugging Face architecture can express.
        FileExistsError: the directory holds a model already.
    """
    folder = epath.Path(directory)
    if (folder / "config.json").exists():
        raise FileExistsError(f"{folder} holds a model already: choose another directory, or remove it")
    config_to_hf(target.config)  # Refuses before anything is written.
    folder.mkdir(parents=True, exist_ok=True)
    specs = names.tensor_specs(target.config)
    write_directory(folder, specs, lambda name: names.stored_form(target.config, target.params, name))
    write_description(folder, target.config, target.tokenizer)


def write_description(directory: epath.Path, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Writes config.json, the tokenizer's files and generation_config.json: all of a model but its weights."""
    tokenizer.save(directory)
    hf = config_to_hf(config)
    # Explicit nulls: some families have defaults that point beyond a small vocabulary.
    hf |= {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
    hf["eos_token_id"] = list(tokenizer.eos_ids) if len(tokenizer.eos_ids) != 1 else tokenizer.eos_ids[0]
    (directory / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
