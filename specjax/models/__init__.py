"""The networks: decoder-only transformers by config, their cache, their tokenizers."""

from specjax.models.attention import View, causal_view
from specjax.models.cache import KVCache, compact, init_cache
from specjax.models.config import ModelConfig, RopeConfig
from specjax.models.decoder import Activations, Decoder, Tap, graph, init_decoder, merge, split
from specjax.models.linear import pack
from specjax.models.target import Target

__all__ = [
    "Activations",
    "Decoder",
    "KVCache",
    "ModelConfig",
    "RopeConfig",
    "Tap",
    "Target",
    "View",
    "causal_view",
    "compact",
    "graph",
    "init_cache",
    "init_decoder",
    "merge",
    "pack",
    "split",
]
