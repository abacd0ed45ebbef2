"""Model families: the `config.json` of a Hugging Face checkpoint to our `ModelConfig`, and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from specjax.models.config import ModelConfig, RopeConfig
from specjax.models.config_values import REQUIRED, check_values, rope_number

Hf = Mapping[str, Any]

ACTIVATION_NAMES = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
DTYPES = ("float32", "bfloat16", "float16")
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True)
class Family:
    """What sets one `model_type` apart.

    Attributes:
        architecture: class name in `architectures`.
        defaults: values of keys that its `config.json` may leave out.
        switches: our fields that the family fixes or computes from its `config.json`.
        extras: keys for `config.json` beyond the common ones, computed from our config.
    """

    architecture: str
    defaults: Hf
    switches: Callable[[Hf], dict[str, Any]]
    extras: Callable[[ModelConfig], dict[str, Any]]


def config_from_hf(hf: Hf, dtype: str = "float32") -> ModelConfig:
    """Our description of the model that a `config.json` describes.

    Args:
        hf: its content; RoPE in the old form (`rope_theta`, `rope_scaling`) or the new (`rope_parameters`).
        dtype: `float32`, `bfloat16` or `float16`, for the parameters and the residual stream.

    Raises:
        ValueError: an unsupported architecture (names the supported ones), missing fields, values that no model can
            have, or a switch that we do not implement.
    """
    check_dtype(dtype)
    if not isinstance(hf, Mapping):
        raise ValueError(f"the model's config is {hf!r}; expected a JSON object")
    family = _family(hf)
    # An explicit null stays: it switches off what the family has by default.
    hf = {**family.defaults, **hf}
    missing = [key for key in REQUIRED if hf.get(key) is None]
    if missing:
        raise ValueError(f"config.json of a {hf['model_type']} model lacks {', '.join(missing)}")
    check_values(hf, family.defaults)
    activation = hf.get("hidden_activation") or hf.get("hidden_act", "silu")
    if not isinstance(activation, str) or activation not in ACTIVATION_NAMES:
        raise ValueError(f"activation {activation!r} is not supported; expected {', '.join(ACTIVATION_NAMES)}")
    heads, layers = hf["num_attention_heads"], hf["num_hidden_layers"]
    head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
    if head_dim < 1:
        raise ValueError(f"hidden_size={hf['hidden_size']} leaves no width for num_attention_heads={heads}")
    fields: dict[str, Any] = dict(
        family=hf["model_type"],
        vocab_size=hf["vocab_size"],
        head_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_position=hf["max_position_embeddings"],
        norm_eps=hf["rms_norm_eps"],
        query_scale=head_dim**-0.5,
        windows=_windows(hf),
        activation=ACTIVATION_NAMES[activation],
        tie_embeddings=hf["tie_word_embeddings"],
        dtype=dtype,
    )
    fields |= family.switches(hf)
    if "ropes" not in fields:
        fields["ropes"] = (_rope(hf),) * layers
    return ModelConfig(**fields)


def check_dtype(dtype: str) -> None:
    """Raises ValueError for a dtype that models are not run in."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` from which transformers, and we, build the same model again.

    Raises:
        ValueError: the head has a reduced vocabulary, or the layers follow no pattern the family can express.
    """
    family = FAMILIES[config.family]
    if config.head_size != config.vocab_size:
        raise ValueError(
            f"a head of {config.head_size} rows over a vocabulary of {config.vocab_size} is a draft's, "
            "which no Hugging Face architecture describes: save it as a drafter"
        )
    activations = {ours: theirs for theirs, ours in ACTIVATION_NAMES.items()}
    hf: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": activations[config.activation],
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": config.dtype,
    }
    hf |= _rope_to_hf(next((rope for rope in config.ropes if rope is not None), RopeConfig()))
    hf |= family.extras(config)
    again = config_from_hf(hf, config.dtype)
    changed = [
        f"{field.name}={getattr(config, field.name)!r}"
        for field in dataclasses.fields(config)
        if getattr(again, field.name) != getattr(config, field.name)
    ]
    if changed:
        raise ValueError(f"a {config.family} config.json cannot express {', '.join(changed)}")
    return hf


def _family(hf: Hf) -> Family:
    kind, architectures = hf.get("model_type"), hf.get("architectures") or []
    if not isinstance(architectures, list | tuple) or not all(isinstance(name, str) for name in architectures):
        raise ValueError(f"architectures={architectures!r}; expected a list of names")
    supported = ", ".join(f"{family.architecture} ({name})" for name, family in FAMILIES.items())
    if not isinstance(kind, str) or kind not in FAMILIES:
        found = ", ".join(architectures) or "none"
        raise ValueError(
            f"unsupported architecture: model_type {kind!r}, architectures {found}; supported: {supported}"
        )
    family = FAMILIES[kind]
    if architectures and family.architecture not in architectures:
        raise ValueError(
            f"unsupported architecture {', '.join(architectures)} of model_type {kind!r}; supported: {supported}"
        )
    if hf.get("quantization_config") is not None:
        given = hf["quantization_config"]
        method = given.get("quant_method", "unknown") if isinstance(given, Mapping) else given
        raise ValueError(
            f"the checkpoint is quantised ({method}); expected float32, bfloat16 or float16 safetensors, or a GGUF file"
        )
    return family


def _windows(hf: Hf) -> tuple[int | None, ...]:
    """Per-layer windows where the file lists `layer_types`; full attention otherwise."""
    layers, types = hf["num_hidden_layers"], hf.get("layer_types")
    if types is None:
        return (None,) * layers
    unknown = sorted(set(types) - {SLIDING, FULL})
    if unknown:
        raise ValueError(f"layer types {', '.join(unknown)} are not supported; expected {SLIDING}, {FULL}")
    if len(types) != layers:
        raise ValueError(f"layer_types lists {len(types)} layers, but num_hidden_layers={layers}")
    if SLIDING in types and not hf.get("sliding_window"):
        raise ValueError(f"layer_types has {SLIDING} layers, but sliding_window is not set")
    return tuple(hf["sliding_window"] if kind == SLIDING else None for kind in types)


def _rope(hf: Hf, part: str | None = None) -> RopeConfig:
    """Rotary embedding; `part` picks a layer type where `rope_parameters` is nested by it."""
    given: Hf = hf.get("rope_parameters") or {}
    if part is not None and part in given:
        given = given[part]
    elif SLIDING in given or FULL in given:
        raise ValueError(f"rope_parameters by layer type are not supported for model_type {hf['model_type']!r}")
    if not isinstance(given, Mapping):
        raise ValueError(f"rope_parameters.{part}={given!r}; expected an object")
    values: dict[str, Any] = {**(hf.get("rope_scaling") or {}), **given}
    kind = values.get("rope_type", values.get("type", "default"))
    theta = rope_number(values if "rope_theta" in values else hf, "rope_theta")
    if values.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return RopeConfig(theta=theta)
    if not isinstance(kind, str) or kind not in ("linear", "llama3", "yarn"):
        raise ValueError(f"rope type {kind!r} is not supported; expected default, linear, llama3 or yarn")
    if "factor" not in values:
        raise ValueError(f"rope type {kind!r} needs a factor")
    where = f"rope type {kind!r}: "
    rope = RopeConfig(theta=theta, scaling=kind, factor=rope_number(values, "factor", where))
    if kind == "linear":
        return rope
    key = "original_max_position_embeddings"
    original = int(rope_number({key: values.get(key) or hf["max_position_embeddings"]}, key, where))
    rope = dataclasses.replace(rope, original_max_position=original)
    if kind == "llama3":
        return dataclasses.replace(
            rope,
            low_freq_factor=rope_number(values, "low_freq_factor", where),
            high_freq_factor=rope_number(values, "high_freq_factor", where),
        )
    return dataclasses.replace(
        rope,
        beta_fast=rope_number({"beta_fast": values.get("beta_fast") or 32.0}, "beta_fast", where),
        beta_slow=rope_number({"beta_slow": values.get("beta_slow") or 1.0}, "beta_slow", where),
        attention_factor=_yarn_attention_factor(values),
        truncate=bool(values.get("truncate", True)),
    )


def _yarn_attention_factor(values: Hf) -> float:
    """Peng et al. 2023, eq. 22, with the two multipliers that DeepSeek added."""

    def growth(scale: float) -> float:
        return 0.1 * scale * math.log(values["factor"]) + 1.0 if values["factor"] > 1 else 1.0

    if values.get("attention_factor") is not None:
        return rope_number(values, "attention_factor", "rope type 'yarn': ")
    if values.get("mscale") and values.get("mscale_all_dim"):
        return growth(values["mscale"]) / growth(values["mscale_all_dim"])
    return growth(1.0)


def _rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """The old form, which every version of transformers and every serving engine reads."""
    if rope.scaling == "none":
        return {"rope_theta": rope.theta}
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_position
    if rope.scaling == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling == "yarn":
        names = ("beta_fast", "beta_slow", "attention_factor", "truncate")
        scaling |= {name: getattr(rope, name) for name in names}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _sliding(config: ModelConfig) -> dict[str, Any]:
    """`sliding_window` and `layer_types` of a config with windows."""
    sizes = {window for window in config.windows if window is not None}
    if len(sizes) > 1:
        raise ValueError(f"one model with windows of {sorted(sizes)} tokens cannot be written")
    types = [FULL if window is None else SLIDING for window in config.windows]
    return {"sliding_window": next(iter(sizes), None), "layer_types": types}


# One pair of functions a family: switches (their config to our fields), extras (the way back).


def _llama(hf: Hf) -> dict[str, Any]:
    bias = hf["attention_bias"]
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": hf["mlp_bias"]}


def _llama_extras(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


def _mistral(hf: Hf) -> dict[str, Any]:
    return {"windows": (hf.get("sliding_window"),) * hf["num_hidden_layers"]}


def _mistral_extras(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": config.windows[0]}


def _qwen_windows(hf: Hf) -> tuple[int | None, ...]:
    layers = hf["num_hidden_layers"]
    if not hf.get("use_sliding_window"):
        return (None,) * layers
    if hf.get("layer_types") is not None:
        return _windows(hf)
    first = hf["max_window_layers"]
    return tuple(hf["sliding_window"] if i >= first else None for i in range(layers))


def _qwen2(hf: Hf) -> dict[str, Any]:
    return {"qkv_bias": True, "windows": _qwen_windows(hf)}


def _qwen2_extras(config: ModelConfig) -> dict[str, Any]:
    windowed = any(window is not None for window in config.windows)
    return {"use_sliding_window": windowed, **(_sliding(config) if windowed else {})}


def _qwen3(hf: Hf) -> dict[str, Any]:
    bias = hf["attention_bias"]
    return {"qk_norm": True, "qkv_bias": bias, "output_bias": bias, "windows": _qwen_windows(hf)}


def _qwen3_extras(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, **_qwen2_extras(config)}


def _smollm3(hf: Hf) -> dict[str, Any]:
    layers, every = hf["num_hidden_layers"], hf["no_rope_layer_interval"]
    rotated = hf.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
    if len(rotated) != layers:
        raise ValueError(f"no_rope_layers lists {len(rotated)} layers, but num_hidden_layers={layers}")
    rope = _rope(hf)
    windows: tuple[int | None, ...] = (None,) * layers
    if hf.get("use_sliding_window") and hf.get("sliding_window"):
        default = [FULL if on else SLIDING for on in rotated]
        windows = _windows({**hf, "layer_types": hf.get("layer_types") or default})
    return {**_llama(hf), "ropes": tuple(rope if on else None for on in rotated), "windows": windows}


def _smollm3_extras(config: ModelConfig) -> dict[str, Any]:
    rotated = [int(rope is not None) for rope in config.ropes]
    return {"no_rope_layers": rotated, **_llama_extras(config), **_qwen2_extras(config)}


def _gemma(hf: Hf) -> dict[str, Any]:
    if hf.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not supported: the model does not generate left to right")
    return {
        "qkv_bias": hf["attention_bias"],
        "output_bias": hf["attention_bias"],
        "norm_offset": 1.0,
        "post_norms": True,
        "embed_scale": hf["hidden_size"] ** 0.5,
        "query_scale": hf["query_pre_attn_scalar"] ** -0.5,
        "attention_softcap": float(hf.get("attn_logit_softcapping") or 0.0),
        "final_softcap": float(hf.get("final_logit_softcapping") or 0.0),
    }


def _gemma_extras(config: ModelConfig) -> dict[str, Any]:
    scalar = config.query_scale**-2
    return {
        "attention_bias": config.qkv_bias,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        "attn_logit_softcapping": config.attention_softcap or None,
        "final_logit_softcapping": config.final_softcap or None,
        **_sliding(config),
    }


def _gemma2(hf: Hf) -> dict[str, Any]:
    layers = hf["num_hidden_layers"]
    types = hf.get("layer_types") or [FULL if i % 2 else SLIDING for i in range(layers)]
    return {**_gemma(hf), "windows": _windows({**hf, "layer_types": types})}


def _gemma3(hf: Hf) -> dict[str, Any]:
    layers, every = hf["num_hidden_layers"], hf["sliding_window_pattern"]
    types = hf.get("layer_types") or [SLIDING if (i + 1) % every else FULL for i in range(layers)]
    windows = _windows({**hf, "layer_types": types})
    given = hf.get("rope_parameters") or {}
    local = RopeConfig(theta=float(hf["rope_local_base_freq"]))
    if SLIDING in given:
        local = _rope({**hf, "rope_theta": hf["rope_local_base_freq"], "rope_scaling": None}, SLIDING)
    wide = _rope(hf, FULL)
    ropes = tuple(wide if window is None else local for window in windows)
    return {**_gemma(hf), "qk_norm": True, "windows": windows, "ropes": ropes}


def _gemma3_extras(config: ModelConfig) -> dict[str, Any]:
    pairs = list(zip(config.windows, config.ropes, strict=True))
    local = next((rope for window, rope in pairs if window is not None), None)
    wide = next((rope for window, rope in pairs if window is None), None)
    extras = _gemma_extras(config)
    if local is not None:
        extras["rope_local_base_freq"] = local.theta
    return extras | (_rope_to_hf(wide) if wide is not None else {})


_COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
_BIASES = {"attention_bias": False, "mlp_bias": False}
_QWEN = {**_COMMON, "max_position_embeddings": 32768, "use_sliding_window": False, "max_window_layers": 28}
_GEMMA = {
    **_COMMON,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", {**_COMMON, **_BIASES, "max_position_embeddings": 2048}, _llama, _llama_extras),
    "qwen2": Family("Qwen2ForCausalLM", _QWEN, _qwen2, _qwen2_extras),
    "mistral": Family(
        "MistralForCausalLM",
        {**_COMMON, "max_position_embeddings": 131072, "sliding_window": 4096},
        _mistral,
        _mistral_extras,
    ),
    "qwen3": Family("Qwen3ForCausalLM", {**_QWEN, "attention_bias": False, "head_dim": 128}, _qwen3, _qwen3_extras),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {
            **_COMMON,
            **_BIASES,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        _smollm3,
        _smollm3_extras,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {
            **_GEMMA,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        _gemma2,
        _gemma_extras,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            **_GEMMA,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "sliding_window_pattern": 6,
        },
        _gemma3,
        _gemma3_extras,
    ),
}
