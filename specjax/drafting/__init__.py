"""Drafting methods, one file each."""

from specjax.drafting.adaptive import Adaptive
from specjax.drafting.autoregressive import Autoregressive
from specjax.drafting.draft_model import DraftModel
from specjax.drafting.draft_tree import DraftTree
from specjax.drafting.eagle import EagleChain
from specjax.drafting.eagle2 import EagleTree
from specjax.drafting.early_exit import EarlyExit
from specjax.drafting.hydra import Hydra
from specjax.drafting.jacobi import Jacobi
from specjax.drafting.kangaroo import Kangaroo
from specjax.drafting.layer_skip import LayerSkip
from specjax.drafting.lookahead import Lookahead
from specjax.drafting.medusa import Medusa
from specjax.drafting.other_tokenizer import OtherTokenizer
from specjax.drafting.prompt_lookup import PromptLookup
from specjax.drafting.recycling import Recycling
from specjax.drafting.redrafter import RecurrentDrafter
from specjax.drafting.retrieval import Retrieval
from specjax.drafting.suffix import Suffix
from specjax.drafting.suffix_tree import SuffixTree

__all__ = [
    "Adaptive",
    "Autoregressive",
    "DraftModel",
    "DraftTree",
    "EagleChain",
    "EagleTree",
    "EarlyExit",
    "Hydra",
    "Jacobi",
    "Kangaroo",
    "LayerSkip",
    "Lookahead",
    "Medusa",
    "OtherTokenizer",
    "PromptLookup",
    "RecurrentDrafter",
    "Recycling",
    "Retrieval",
    "Suffix",
    "SuffixTree",
]
