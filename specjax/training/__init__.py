"""Training of drafters: data, the hidden-state store, objectives, the trainer, regeneration of text by the target."""

from specjax.training.data import Answer, Batch, Document, read_answers, render
from specjax.training.feed import Source
from specjax.training.hidden_states import HiddenStates, StoreConfig, write_store
from specjax.training.objectives import Loss, Objective
from specjax.training.optimizer import OptimizerConfig, make_optimizer
from specjax.training.trainer import Trainer, TrainerConfig

__all__ = [
    "Answer",
    "Batch",
    "Document",
    "HiddenStates",
    "Loss",
    "Objective",
    "OptimizerConfig",
    "Source",
    "StoreConfig",
    "Trainer",
    "TrainerConfig",
    "make_optimizer",
    "read_answers",
    "render",
    "write_store",
]
