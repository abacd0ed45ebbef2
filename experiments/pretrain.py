"""Trains a target itself: python -m experiments.pretrain --config=configs/mtp.py:small,heads=4

A small one from scratch, with multi-token prediction (configs/mtp.py) or LayerSkip (configs/layerskip.py): the corpus
is Python's standard library and the prose of SPECJAX_DATA; the tokenizer is trained on it first. Or a pretrained one
further, where the config names a target, on the text that it wrote, or the run that made it (`init_from`): with heads,
as in Medusa-2 (configs/medusa2.py). The same command resumes; SIGTERM saves and ends with exit
code 75, which schedulers take as "start it again".

At the end the best checkpoint is in `target/`, a model directory for `load_target`, and heads in `drafter/`, for
drafter `mtp` or `medusa`; `prompts.jsonl` has beginnings of held-out texts to measure on. `results.json` has accuracy
and perplexity before and after for LayerSkip and Medusa-2, for multi-token prediction the next token's loss by held-out
row, which experiments.next_token compares over runs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path

import jax
import ml_collections
import numpy as np
from absl import logging

from experiments import _exits, _main, _next_token, _perplexity
from experiments._progress import progress
from specjax import build
from specjax.checkpoints import drafters
from specjax.checkpoints.directory import save_target
from specjax.evaluation import results
from specjax.models import ModelConfig, RopeConfig, Target, graph, init_decoder
from specjax.models.target import config_hash
from specjax.training import OptimizerConfig, Trainer, TrainerConfig, corpus
from specjax.training.data import Document, text_rows
from specjax.training.objectives.layerskip import LayerSkipPretraining
from specjax.training.objectives.medusa_joint import MedusaJoint
from specjax.training.objectives.mtp_pretrain import MultiTokenPretraining
from specjax.training.objectives.mtp_sequential import SequentialPretraining
from specjax.training.objectives.registry import PRETRAINING


def main(config: ml_collections.ConfigDict) -> None:
    """Makes the corpus and the model, trains, saves."""
    logging.set_verbosity(logging.WARNING)
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ending.append(number))
    results.check_writable(_main.workdir())
    data_dir = Path(os.environ.get("SPECJAX_DATA", _main.DATA))
    target, rows = continued(config, data_dir) if "target" in config else prepare(config, data_dir)
    if config.get("init_from"):
        target = dataclasses.replace(target, params=build.params_of(config.init_from, target)()["target"])
    options = config.objective.to_dict()
    make = build.lookup(PRETRAINING, options.pop("name"), "objective of pretraining")
    trainer = Trainer(
        target=target,
        objective=make(target, config.train.steps, **options),
        tables={},
        optimizer=OptimizerConfig(**config.optimizer.to_dict()),
        config=TrainerConfig(**config.train.to_dict()),
        train=rows.train,
        held_out=rows.held_out,
    )
    size = sum(np.prod(x.shape) for x in jax.tree.leaves(target.params))
    print(f"{size / 1e6:.2f} M parameters, {int((rows.train.text.segments > 0).sum()) / 1e6:.2f} M tokens")
    with progress("pretraining", trainer.config.steps) as report:
        trainer.run(_main.workdir(), config.to_dict(), report=report, stop=lambda: bool(ending))
    metrics = export(config, target, trainer, rows)
    if isinstance(trainer.objective, LayerSkipPretraining):
        _exits.report(config, metrics, rows.held_out, target.config.num_layers)
    if isinstance(trainer.objective, MedusaJoint):
        _perplexity.report(config, metrics, rows.held_out)
    if rows.openings:
        write_prompts(target, rows.openings)
    print(f"{'interrupted, saved' if ending else 'done'}: {_main.workdir()}")
    if ending:
        raise SystemExit(_main.RESTART)


def prepare(config: ml_collections.ConfigDict, data_dir: Path) -> tuple[Target, corpus.Corpus]:
    """Texts, tokenizer, packed rows, and a model that knows nothing yet."""
    data = config.data
    texts = [*corpus.standard_library(data.code_characters), *corpus.text_files(data_dir / data.prose)]
    train, apart = corpus.hold_out(texts)
    tokenizer = corpus.train_tokenizer(train, config.model.vocab_size)

    def documents(part: list[corpus.Text]) -> dict[str, list[Document]]:
        kinds = ("code", "prose")
        return {kind: corpus.pieces([t for t in part if t.kind == kind], tokenizer, data.row_length) for kind in kinds}

    rows = corpus.lay_out_corpus(
        documents(train), documents(apart), data.row_length, data.held_out_rows, data.max_tokens
    )
    shapes = model_config(config.model)
    target = Target(
        config=shapes,
        graph=graph(shapes)[0],
        params=init_decoder(shapes, jax.random.key(config.train.seed)),
        tokenizer=tokenizer,
        name="pretrained",
        config_hash=config_hash(shapes),
        eos_ids=tokenizer.eos_ids,
        context=shapes.max_position,
    )
    return target, rows


def continued(config: ml_collections.ConfigDict, data_dir: Path) -> tuple[Target, corpus.Corpus]:
    """A pretrained target, and its own answers: all to learn from, of the held-out ones the greedy and the sampled."""
    data, target = config.data, build.target_from_config(config.target)
    held_out = {
        kind: text_rows(data_dir / data.held_out_text, target, data.row_length, temperature, data.held_out_rows)
        for kind, temperature in (("greedy", 0.0), ("sampled", 1.0))
    }
    return target, corpus.Corpus(text_rows(data_dir / data.text, target, data.row_length), held_out, {})


def model_config(model: ml_collections.ConfigDict) -> ModelConfig:
    """A Llama with a tied vocabulary."""
    head_dim = model.hidden_size // model.num_heads
    return ModelConfig(
        family="llama",
        **model.to_dict(),
        head_size=model.vocab_size,
        head_dim=head_dim,
        norm_eps=1e-5,
        query_scale=head_dim**-0.5,
        windows=(None,) * model.num_layers,
        ropes=(RopeConfig(),) * model.num_layers,
        tie_embeddings=True,
    )


def export(
    config: ml_collections.ConfigDict, target: Target, trainer: Trainer, rows: corpus.Corpus
) -> dict[str, float]:
    """Writes the best checkpoint's target, and its further heads as a drafter; returns its held-out metrics."""
    step, metrics, params = build.best_params(_main.workdir())
    trained = dataclasses.replace(target, params=params["target"])
    objective = trainer.objective
    if isinstance(objective, MultiTokenPretraining | SequentialPretraining):
        _next_token.report(config, trained, rows.held_out)
    directory = _main.workdir() / "target"
    if directory.exists():
        directory.rmtree()  # of an earlier end of this run
    save_target(trained, directory)
    heads = isinstance(objective, MultiTokenPretraining) and objective.heads > 1
    if heads or isinstance(objective, MedusaJoint | SequentialPretraining):
        info = {"step": step, "rows": trainer.train.rows, "held_out": metrics, "training": config.to_dict()}
        saved = objective.export(params, {}, info)
        drafters.save_drafter(_main.workdir() / "drafter", saved, trained)
    return metrics


def write_prompts(target: Target, openings: dict[str, list[list[int]]], count: int = 16) -> None:
    """`count` openings of each kind, spread over all, as a prompt file for experiments.benchmark."""
    lines = [
        json.dumps({"id": f"{kind}-{i}", "category": kind, "turns": [target.tokenizer.decode(ids)]})
        for kind, own in openings.items()
        for i, ids in enumerate(corpus.spread(own, count))
    ]
    (_main.workdir() / "prompts.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    _main.run(main, config="configs/mtp.py", workdir="runs/mtp")
