"""llama2.c checkpoints (version 0) and their tokenizers: small Llama models that train and test in seconds."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from etils import epath

from specjax.checkpoints import names, vocabularies
from specjax.checkpoints.directory import write_description
from specjax.checkpoints.gguf import half_split
from specjax.checkpoints.safetensors import write_directory
from specjax.models.config import ModelConfig
from specjax.models.families import config_from_hf
from specjax.models.tokenizer import Tokenizer

_HEADER = struct.Struct("<7i")
BOS, EOS = 1, 2


def find_tokenizer(checkpoint: Path) -> Path:
    """The tokenizer file beside a checkpoint.

    Raises:
        FileNotFoundError: there is none, or more than one.
    """
    found = sorted(checkpoint.parent.glob("tok*.bin"))
    if len(found) != 1:
        names_found = ", ".join(path.name for path in found) or "none"
        raise FileNotFoundError(f"expected one tok*.bin beside {checkpoint}, found {names_found}")
    return found[0]


def read_config(checkpoint: Path) -> ModelConfig:
    """The config in the header; a negative vocabulary size means an untied head."""
    with checkpoint.open("rb") as stream:
        head = stream.read(_HEADER.size)
    if len(head) < _HEADER.size:
        raise ValueError(f"{checkpoint} is truncated: {len(head)} bytes, less than its header")
    dim, hidden, layers, heads, kv_heads, vocab, context = _HEADER.unpack(head)
    if min(dim, hidden, layers, heads, kv_heads, context) <= 0 or not vocab or dim % max(heads, 1):
        raise ValueError(f"{checkpoint} does not begin with a llama2.c version 0 header")
    return config_from_hf(
        {
            "model_type": "llama",
            "vocab_size": abs(vocab),
            "hidden_size": dim,
            "intermediate_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": context,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": vocab > 0,
        }
    )


def read_tensors(checkpoint: Path, config: ModelConfig) -> dict[str, np.ndarray]:
    """The weights under their Hugging Face names, rotary pairs in half-split order.

    Raises:
        ValueError: the file is shorter or longer than its header says.
    """
    c, n = config, config.num_layers
    kv = c.num_kv_heads * c.head_dim
    parts: list[tuple[str, tuple[int, ...]]] = [
        ("model.embed_tokens.weight", (c.vocab_size, c.hidden_size)),
        ("input_layernorm", (n, c.hidden_size)),
        ("self_attn.q_proj", (n, c.hidden_size, c.hidden_size)),
        ("self_attn.k_proj", (n, kv, c.hidden_size)),
        ("self_attn.v_proj", (n, kv, c.hidden_size)),
        ("self_attn.o_proj", (n, c.hidden_size, c.hidden_size)),
        ("post_attention_layernorm", (n, c.hidden_size)),
        ("mlp.gate_proj", (n, c.intermediate_size, c.hidden_size)),
        ("mlp.down_proj", (n, c.hidden_size, c.intermediate_size)),
        ("mlp.up_proj", (n, c.intermediate_size, c.hidden_size)),
        ("model.norm.weight", (c.hidden_size,)),
        ("rotary tables", (c.max_position, c.head_dim)),
    ]
    if not c.tie_embeddings:
        parts.append(("lm_head.weight", (c.vocab_size, c.hidden_size)))
    flat = np.fromfile(checkpoint, np.float32, offset=_HEADER.size)
    needed = sum(int(np.prod(shape)) for _, shape in parts)
    if flat.size != needed:
        raise ValueError(f"{checkpoint} holds {flat.size} weights, and its header describes {needed}")
    tensors: dict[str, np.ndarray] = {}
    start = 0
    for name, shape in parts:
        array = flat[start : start + int(np.prod(shape))].reshape(shape)
        start += array.size
        if name.endswith(".weight"):
            tensors[name] = array
        elif name != "rotary tables":
            for i, layer in enumerate(array):
                heads = {"self_attn.q_proj": c.num_heads, "self_attn.k_proj": c.num_kv_heads}.get(name)
                tensors[f"model.layers.{i}.{name}.weight"] = layer if heads is None else half_split(layer, heads)
    return tensors


def read_tokenizer(path: Path, vocab: int) -> Tokenizer:
    """A SentencePiece BPE from pieces and scores; the first 259 are unknown, begin, end and 256 bytes.

    Raises:
        ValueError: the file ends before `vocab` pieces, or has another number of them.
    """
    data = path.read_bytes()
    tokens: list[str] = []
    scores: list[float] = []
    at = 4
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at) if at + 8 <= len(data) else (0.0, len(data))
        text = data[at + 8 : at + 8 + length]
        if len(text) != length:
            raise ValueError(f"{path} is truncated: it ends within piece {len(tokens)} of {vocab}: fetch it again")
        tokens.append(text.decode("utf-8").replace(" ", "\u2581"))
        scores.append(score)
        at += 8 + length
    if len(tokens) != vocab:
        raise ValueError(f"{path} has {len(tokens)} pieces, the model a vocabulary of {vocab}")
    for special in (BOS, EOS):
        tokens[special] = tokens[special].strip("\n")
    v = vocabularies
    types = [v.UNKNOWN, v.CONTROL, v.CONTROL, *[v.BYTE] * 256] + [v.NORMAL] * (vocab - 259)
    backend = vocabularies.sentencepiece_bpe(tokens, scores, types, space_prefix=True, bos=BOS)
    return Tokenizer(backend=backend, eos_ids=(EOS,), bos_id=BOS)


def convert(checkpoint: Path, vocabulary: Path, directory: epath.PathLike) -> None:
    """Writes a llama2.c checkpoint and its tokenizer as a Hugging Face directory."""
    folder = epath.Path(directory)
    config = read_config(checkpoint)
    tensors = read_tensors(checkpoint, config)
    write_directory(folder, names.tensor_specs(config), tensors.__getitem__)
    write_description(folder, config, read_tokenizer(vocabulary, config.vocab_size))
