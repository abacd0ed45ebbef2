"""What the heads that other programs serve are made of: one plain Llama layer, three taps, no head of EAGLE-1's own.

Servers build a Llama layer whatever the target is: tensors that it has no place for are dropped or raise, and what it
does not compute is not computed. Such a head is refused here, before it drafts badly there.
"""

from __future__ import annotations

import math

from specjax.checkpoints.drafters import SavedDrafter
from specjax.models.config import ModelConfig
from specjax.models.eagle import Eagle3Config, EagleConfig

FUSED = 3  # taps that vLLM, SGLang and SpecForge fuse, whatever a config says


def refuse_others(drafter: SavedDrafter, layout: str, layers: int) -> None:
    """Checks that the readers of a layout compute what this head computes.

    Args:
        drafter: an EAGLE head.
        layout: that it shall be written in, for the message and for what it can express.
        layers: of the target.

    Raises:
        ValueError: they do not; every reason is named.
    """
    config: EagleConfig | Eagle3Config = drafter.config
    reasons = layer_reasons(config.layer)
    if reasons:
        raise ValueError(
            f"the layout {layout!r} holds one plain Llama layer, this head has {'; '.join(reasons)}, which servers "
            "would drop. Train the head with objective.layer='plain', or keep the layout 'specjax'"
        )
    if isinstance(config, EagleConfig):
        if "head" not in drafter.shares:
            raise ValueError(
                f"this head has an output head of its own, and every reader of the layout {layout!r} takes the "
                "target's in its place: keep the layout 'specjax'"
            )
        return
    if len(config.taps) != FUSED:
        raise ValueError(f"taps={config.taps}: the readers of the layout {layout!r} fuse {FUSED} layers")
    if config.fc_norm and config.norm_before_fc:
        raise ValueError(
            f"this head has fc_norm and norm_before_fc, and the readers of the layout {layout!r} have one of them at "
            "most: train with one, or keep the layout 'specjax'"
        )
    if layers in config.taps:
        raise ValueError(
            f"taps={config.taps}: servers read the inputs of layers, and none has number {layers}, which is the last "
            "one's output here: keep the layout 'specjax', or train with earlier taps"
        )
    if layout == "eagle3" and config.norm_output:
        raise ValueError(
            "this head hands its normed feature on (norm_output), which in the layout 'eagle3' means something else to "
            "SpecForge: write the layout 'speculators'"
        )
    if layout == "eagle3" and min(config.taps) == 0:
        raise ValueError(
            f"taps={config.taps}: the layout 'eagle3' names layers by their outputs, and tap 0, the embeddings, is "
            "no layer's: write the layout 'speculators', or train with taps from 1 on"
        )


def layer_reasons(layer: ModelConfig) -> list[str]:
    """What a layer has that a plain Llama layer has not, in words."""
    found = {
        "norms of queries and keys (q_norm, k_norm)": layer.qk_norm,
        "biases in its attention (q, k, v or o)": layer.qkv_bias or layer.output_bias,
        "biases in its MLP": layer.mlp_bias,
        f"norm weights stored minus {layer.norm_offset:g}": layer.norm_offset,
        f"the activation {layer.activation!r}": layer.activation != "silu",
        f"embeddings scaled by {layer.embed_scale:g}": layer.embed_scale != 1,
        f"queries scaled by {layer.query_scale:g}": not math.isclose(layer.query_scale, layer.head_dim**-0.5),
        f"attention scores capped at {layer.attention_softcap:g}": layer.attention_softcap,
        f"logits capped at {layer.final_softcap:g}": layer.final_softcap,
        "no rotary embedding": layer.ropes[0] is None,
        f"a sliding window of {layer.windows[0]}": layer.windows[0] is not None,
    }
    return [reason for reason, there in found.items() if there]
