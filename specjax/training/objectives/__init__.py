"""Objectives: pure functions of trainable parameters, tables, the frozen target and a batch. One file each."""

from specjax.training.objectives.base import Loss, Objective
from specjax.training.objectives.distill import DIVERGENCES, Distill
from specjax.training.objectives.hydra import Hydra
from specjax.training.objectives.lm import LanguageModel
from specjax.training.objectives.medusa import Medusa
from specjax.training.objectives.redrafter import RecurrentDrafting

__all__ = ["DIVERGENCES", "Distill", "Hydra", "LanguageModel", "Loss", "Medusa", "Objective", "RecurrentDrafting"]
