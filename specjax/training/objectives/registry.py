"""Training objectives by name. An objective is one file beside this one, one maker and one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specjax.models import Target
from specjax.training.draft import Student
from specjax.training.objectives.base import Objective
from specjax.training.objectives.distill import Distill
from specjax.training.objectives.lm import LanguageModel


def _student(target: Target, options: dict[str, Any]) -> Student:
    return Student(target.config, tuple(options["layers"]), options["intermediate_size"], options["draft_vocab"])


def _distill(target: Target, divergence: str, **student: Any) -> Objective:
    return Distill(_student(target, student), divergence)


def _lm(target: Target, **student: Any) -> Objective:
    return LanguageModel(_student(target, student))


# name -> maker(target, **options)
OBJECTIVES: dict[str, Callable[..., Objective]] = {"distill": _distill, "lm": _lm}
