"""Drafting methods, one file each."""

from specjax.drafting.autoregressive import Autoregressive
from specjax.drafting.draft_model import DraftModel
from specjax.drafting.hydra import Hydra
from specjax.drafting.medusa import Medusa
from specjax.drafting.prompt_lookup import PromptLookup

__all__ = ["Autoregressive", "DraftModel", "Hydra", "Medusa", "PromptLookup"]
