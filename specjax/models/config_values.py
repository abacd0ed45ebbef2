"""What the values of a `config.json` may be, told before anything is made from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
WHOLE = (*REQUIRED, "max_position_embeddings", "num_key_value_heads", "head_dim")
POSITIVE = (
    *("rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar"),
    *("no_rope_layer_interval", "sliding_window_pattern"),
)
# A null says that there is none, or that another key has it.
NULLABLE = (
    *("num_key_value_heads", "head_dim", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
    *("max_window_layers", "rope_theta"),
)


def check_values(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Checks types and ranges of what a model is made from.

    Args:
        hf: content of a `config.json`, with the family's defaults.
        defaults: those, which say of which type the family's own keys are.

    Raises:
        ValueError: a value does not fit; names its key.
    """
    numbers = [key for key, value in defaults.items() if isinstance(value, int | float) and not isinstance(value, bool)]
    for key in dict.fromkeys((*WHOLE, *numbers)):
        value = hf.get(key)
        if value is None and (key in NULLABLE or key not in hf):
            continue
        kind: Any = int if key in WHOLE else int | float
        if not isinstance(value, kind) or isinstance(value, bool) or not math.isfinite(value):
            fits = False
        else:
            fits = value > 0 or key not in (*WHOLE, *POSITIVE)
        if not fits:
            above = " above 0" if key in POSITIVE else ""
            raise ValueError(
                f"{key}={value!r}; expected {'a whole number, 1 or more' if key in WHOLE else 'a number' + above}"
            )
    for key in (key for key, value in defaults.items() if isinstance(value, bool)):
        if not isinstance(hf[key], bool | None):
            raise ValueError(f"{key}={hf[key]!r}; expected true or false")
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(hf.get(key), Mapping | None):
            raise ValueError(f"{key}={hf[key]!r}; expected an object, or null")
    for key in ("layer_types", "no_rope_layers"):
        if not isinstance(hf.get(key), list | tuple | None):
            raise ValueError(f"{key}={hf[key]!r}; expected a list with an entry for each layer, or null")


def rope_number(values: Mapping[str, Any], key: str, where: str = "") -> float:
    """A number above 0 of the rotary embedding.

    Raises:
        ValueError: there is none, or something else.
    """
    if (value := values.get(key)) is None:
        raise ValueError(f"{where}{key} is missing or null; expected a number above 0")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{where}{key}={value!r}; expected a number above 0")
    return float(value)
