"""What a decoder-only transformer is made of: one frozen description for every supported family."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of one layer, half-split layout.

    Attributes:
        theta: base of the geometric frequency series.
        scaling: `none`, `linear`, `llama3` or `yarn`.
        factor: context extension factor of the scaling.
        original_max_position: context of pretraining, for `llama3` and `yarn`.
        low_freq_factor: `llama3`: wavelengths above original/low are divided by `factor`.
        high_freq_factor: `llama3`: wavelengths below original/high are kept.
        beta_fast: `yarn`: rotations above which a frequency is kept.
        beta_slow: `yarn`: rotations below which a frequency is divided by `factor`.
        attention_factor: `yarn`: multiplies cos and sin.
        truncate: `yarn`: round the correction range to whole dimensions.
    """

    theta: float = 10000.0
    scaling: str = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and switches of a decoder. Hashable: it is a static of every compiled step.

    Attributes:
        family: Hugging Face `model_type` that the tensor names follow.
        vocab_size: rows of the embedding, padding rows included.
        head_size: rows of the output head; differs from `vocab_size` only in drafts with a reduced vocabulary.
        hidden_size: width d of the residual stream.
        intermediate_size: width of the gated MLP.
        num_layers: transformer layers.
        num_heads: query heads N.
        num_kv_heads: key and value heads K; K divides N.
        head_dim: width H of a head.
        max_position: longest context the model was made for, in tokens.
        norm_eps: epsilon of every RMS norm.
        norm_offset: added to every norm weight (1 in Gemma, whose weights are stored minus one).
        activation: `silu` or `gelu_tanh`.
        tie_embeddings: the head is the embedding.
        qkv_bias: q, k, v projections have a bias (Qwen2).
        output_bias: the attention output projection has one.
        mlp_bias: the MLP projections have one.
        qk_norm: RMS norm over each query and key head (Qwen3, Gemma 3).
        post_norms: norms after attention and MLP as well (Gemma 2 and 3).
        embed_scale: multiplies token embeddings.
        query_scale: multiplies queries; `head_dim ** -0.5` unless the family says otherwise.
        attention_softcap: tanh cap on attention scores, 0 for none.
        final_softcap: tanh cap on logits, 0 for none.
        windows: a sliding window in positions per layer, None for full attention.
        ropes: rotary embedding per layer, None for no positional signal (SmolLM3).
        dtype: of the parameters and the residual stream.
    """

    family: str
    vocab_size: int
    head_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    query_scale: float
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig | None, ...]
    norm_offset: float = 0.0
    activation: str = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embed_scale: float = 1.0
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        for name in ("windows", "ropes"):
            if len(getattr(self, name)) != self.num_layers:
                found = len(getattr(self, name))
                raise ValueError(f"{name} lists {found} layers, but num_layers={self.num_layers}")
        if self.tie_embeddings and self.head_size != self.vocab_size:
            raise ValueError(
                f"a tied head has vocab_size={self.vocab_size} rows, not head_size={self.head_size}; "
                "set tie_embeddings=False for a reduced vocabulary"
            )

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads // self.num_kv_heads

    def with_layers(self, layers: tuple[int, ...]) -> ModelConfig:
        """The same model reduced to `layers` (indices into the present ones), in that order."""
        return dataclasses.replace(
            self,
            num_layers=len(layers),
            windows=tuple(self.windows[i] for i in layers),
            ropes=tuple(self.ropes[i] for i in layers),
        )


def check_taps(taps: Iterable[Any], layers: int) -> None:
    """Checks that a target has the layers whose inputs are to be read; n is what the last of n layers leaves behind.

    Raises:
        ValueError: it does not.
    """
    outside = [tap for tap in taps if isinstance(tap, int) and not 0 <= tap <= layers]
    if outside:
        raise ValueError(
            f"tap {outside[0]} lies outside the model: the target has {layers} layers; expected 0 to {layers - 1}, the "
            f"layer whose input is read, or {layers} for the last one's output"
        )


def check_exit_layer(exit_layer: int, layers: int) -> None:
    """Checks that some layers draft and some are left to verify.

    Raises:
        ValueError: they do not.
    """
    if not 0 < exit_layer < layers:
        raise ValueError(
            f"exit_layer={exit_layer} lies outside the model: the target has {layers} layers; "
            f"expected 1 to {layers - 1}, the number of layers that draft"
        )
