"""Training objectives by name. An objective is one file beside this one, one maker and one line here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from specjax.models import ModelConfig, Target
from specjax.models.config import check_taps
from specjax.models.eagle import Eagle3Config, EagleConfig, default_taps, draft_layer, plain_layer
from specjax.models.kangaroo import kangaroo_config
from specjax.models.medusa import HydraConfig, MedusaConfig
from specjax.models.mtp import mtp_config
from specjax.models.redrafter import RedrafterConfig
from specjax.training.draft import Student
from specjax.training.objectives.base import Objective
from specjax.training.objectives.distill import Distill
from specjax.training.objectives.eagle import EagleRegression
from specjax.training.objectives.eagle3 import TrainingTimeTest
from specjax.training.objectives.heads import HeadsLoss
from specjax.training.objectives.hydra import Hydra
from specjax.training.objectives.kangaroo import KangarooDistillation
from specjax.training.objectives.layerskip import LayerSkipPretraining, Schedule
from specjax.training.objectives.lm import LanguageModel
from specjax.training.objectives.medusa import Medusa
from specjax.training.objectives.medusa_joint import MedusaJoint
from specjax.training.objectives.mtp import MultiTokenHeads
from specjax.training.objectives.mtp_pretrain import MultiTokenPretraining
from specjax.training.objectives.mtp_sequential import SequentialPretraining
from specjax.training.objectives.redrafter import RecurrentDrafting


def _student(target: Target, layers: tuple[int, ...], intermediate_size: int, draft_vocab: int) -> Student:
    return Student(target.config, tuple(layers), intermediate_size, draft_vocab)


def _distill(target: Target, divergence: str, beta: float = 0.5, **student: Any) -> Objective:
    return Distill(_student(target, **student), divergence, beta)


def _lm(target: Target, **student: Any) -> Objective:
    return LanguageModel(_student(target, **student))


def _shapes(target: Target, draft_vocab: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    """What the configs of Medusa and Hydra share."""
    return {
        "hidden_size": target.config.hidden_size,
        "vocab_size": target.config.vocab_size,
        "head_size": draft_vocab,
        "num_heads": num_heads,
        "num_layers": num_layers,
        "final_softcap": target.config.final_softcap,
    }


def _medusa(target: Target, draft_vocab: int, num_heads: int, num_layers: int = 1, **criterion: Any) -> Objective:
    return Medusa(MedusaConfig(**_shapes(target, draft_vocab, num_heads, num_layers)), HeadsLoss(**criterion))


def _hydra(
    target: Target,
    draft_vocab: int,
    num_heads: int,
    num_layers: int = 1,
    embed_rank: int = 0,
    residual: str = "linear",
    prefix: bool = False,
    **criterion: Any,
) -> Objective:
    """`prefix` is Hydra++'s layer, of the shapes of the target's last."""
    shapes = _shapes(target, draft_vocab, num_heads, num_layers)
    layer = target.config.with_layers((target.config.num_layers - 1,)) if prefix else None
    config = HydraConfig(**shapes, embed_rank=embed_rank, residual=residual, prefix=layer)
    return Hydra(config, HeadsLoss(**criterion))


def _draft_layer(target: Target, kind: str, intermediate_size: int, draft_vocab: int) -> ModelConfig:
    layer = draft_layer(target.config, intermediate_size=intermediate_size, head_size=draft_vocab)
    if kind not in ("target", "plain"):
        raise ValueError(f"layer={kind!r}; expected 'target' (as the target's) or 'plain' (Llama's, for servers)")
    return plain_layer(layer) if kind == "plain" else layer


def _eagle(
    target: Target, intermediate_size: int, draft_vocab: int, bias: bool = False, layer: str = "target", **loss: Any
) -> Objective:
    """`layer` is `target` or `plain`; see `draft_layer` and `plain_layer`."""
    shapes = _draft_layer(target, layer, intermediate_size, draft_vocab)
    return EagleRegression(EagleConfig(layer=shapes, bias=bias), **loss)


def _eagle3(
    target: Target,
    intermediate_size: int,
    draft_vocab: int,
    taps: tuple[int, ...] = (),
    norms: tuple[str, ...] = (),
    steps: int = 7,
    decay: float = 0.8,
    own_head: bool = False,
    layer: str = "target",
) -> Objective:
    """`norms` names the switches of `Eagle3Config` that are on; `layer` as for EAGLE-1."""
    switches = [field.name for field in dataclasses.fields(Eagle3Config) if field.type == "bool"]
    if unknown := [name for name in norms if name not in switches]:
        raise ValueError(f"norms={norms!r}: {unknown[0]!r} is unknown; expected some of {', '.join(switches)}")
    check_taps(taps, target.config.num_layers)
    config = Eagle3Config(
        layer=_draft_layer(target, layer, intermediate_size, draft_vocab),
        taps=tuple(taps) or default_taps(target.config.num_layers),
        target_hidden_size=target.config.hidden_size,
        **dict.fromkeys(norms, True),
    )
    return TrainingTimeTest(config, steps, decay, own_head)


def _kangaroo(target: Target, exit_layer: int, draft_vocab: int, divergence: str = "forward_kl") -> Objective:
    return KangarooDistillation(kangaroo_config(target.config, exit_layer, draft_vocab), divergence)


def _mtp(
    target: Target, depth: int, kind: Any, draft_vocab: int, shared: bool = False, decay: float = 0.6, **criterion: Any
) -> Objective:
    config = mtp_config(target.config, depth=depth, kind=kind, shared=shared, draft_vocab=draft_vocab)
    return MultiTokenHeads(config, HeadsLoss(decay=decay, **criterion))


def _redrafter(
    target: Target,
    draft_vocab: int,
    steps: int = 5,
    num_layers: int = 2,
    exit_dim: int = 0,
    recurrent: bool = True,
    decay: float = 1.0,
    ranks: int = 1,
    **criterion: Any,
) -> Objective:
    """`exit_dim` 0 is twice the target's width, as published."""
    config = RedrafterConfig(
        hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
        head_size=draft_vocab,
        exit_dim=exit_dim or 2 * target.config.hidden_size,
        num_layers=num_layers,
        recurrent=recurrent,
        final_softcap=target.config.final_softcap,
    )
    return RecurrentDrafting(config, steps, HeadsLoss(decay=decay, ranks=ranks, **criterion))


def _layerskip(target: Target, steps: int, **options: Any) -> Objective:
    return LayerSkipPretraining(target.config, Schedule(target.config.num_layers, steps, **options))


def _medusa_joint(
    target: Target,
    steps: int,
    num_heads: int,
    num_layers: int = 1,
    weight: float = 0.2,
    warmup: int = 0,
    anchor: float = 0.0,
    **criterion: Any,
) -> Objective:
    if warmup >= steps:
        raise ValueError(f"warmup={warmup} of steps={steps}: the target would never be trained; expected fewer")
    config = MedusaConfig(**_shapes(target, target.config.vocab_size, num_heads, num_layers))
    return MedusaJoint(target.config, config, HeadsLoss(**criterion), weight, warmup, anchor)


def _mtp_pretraining(target: Target, steps: int, kind: str = "independent", **options: Any) -> Objective:
    if kind == "independent":
        return MultiTokenPretraining(target.config, **options)
    if kind == "sequential":
        return _sequential_pretraining(target, steps, **options)
    raise ValueError(f"kind={kind!r}; expected independent or sequential")


def _sequential_pretraining(
    target: Target, steps: int, heads: int, weights: tuple[float, ...] = (0.3, 0.1), switch: float = 0.68
) -> Objective:
    """`switch` is the share of the steps after which the modules weigh less; the paper's is 10 of 14.8 T tokens."""
    if not 0 <= switch <= 1:
        raise ValueError(f"switch={switch}; expected a share of the steps, in [0, 1]")
    return SequentialPretraining(target.config, heads, tuple(weights), round(switch * steps))


# name -> maker(target, **options)
OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "distill": _distill,
    "eagle": _eagle,
    "eagle3": _eagle3,
    "hydra": _hydra,
    "kangaroo": _kangaroo,
    "lm": _lm,
    "medusa": _medusa,
    "mtp": _mtp,
    "redrafter": _redrafter,
}

# Those that train the target itself: name -> maker(target, steps, **options)
PRETRAINING: dict[str, Callable[..., Objective]] = {
    "layerskip": _layerskip,
    "medusa2": _medusa_joint,
    "mtp": _mtp_pretraining,
}
