"""stories260K, a real model of a quarter of a megabyte: golden text, against a forward pass of our own in numpy."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from specjax.checkpoints import llama2c, load_target
from tests.models.test_families import full

PROMPT = "Once upon a time, there was a little girl"
GOLDEN = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big, red ball. She wanted to play with it, but"
)


@pytest.fixture(scope="module")
def checkpoint(data_dir: Path) -> Path:
    return data_dir / "models_tiny" / "stories260K.bin"


class Reference:
    """The llama2.c network as its format describes it: interleaved rotary pairs, one token at a time."""

    def __init__(self, path: Path):
        data = path.read_bytes()
        self.dim, hidden, self.layers, self.heads, self.kv, vocab, context = struct.unpack("<7i", data[:28])
        self.size = self.dim // self.heads
        flat = np.frombuffer(data, np.float32, offset=28).astype(np.float64)
        shapes = {
            "embed": (vocab, self.dim),
            "norm1": (self.layers, self.dim),
            "q": (self.layers, self.dim, self.dim),
            "k": (self.layers, self.kv * self.size, self.dim),
            "v": (self.layers, self.kv * self.size, self.dim),
            "o": (self.layers, self.dim, self.dim),
            "norm2": (self.layers, self.dim),
            "w1": (self.layers, hidden, self.dim),
            "w2": (self.layers, self.dim, hidden),
            "w3": (self.layers, hidden, self.dim),
            "norm": (self.dim,),
        }
        self.w = {}
        for name, shape in shapes.items():
            count = int(np.prod(shape))
            self.w[name], flat = flat[:count].reshape(shape), flat[count:]
        assert flat.size == context * self.size
        self.keys: list[list[np.ndarray]] = [[] for _ in range(self.layers)]
        self.values: list[list[np.ndarray]] = [[] for _ in range(self.layers)]

    def norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return weight * x / np.sqrt((x * x).mean() + 1e-5)

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        pairs = x.reshape(-1, self.size // 2, 2)
        angle = position * 10000.0 ** (-2 * np.arange(self.size // 2) / self.size)
        a, b = pairs[..., 0], pairs[..., 1]
        turned = [a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)]
        return np.stack(turned, -1).reshape(-1, self.size)

    def step(self, token: int, position: int) -> np.ndarray:
        w, x = self.w, self.w["embed"][token]
        for i in range(self.layers):
            y = self.norm(x, w["norm1"][i])
            q = self.rotate(w["q"][i] @ y, position)
            self.keys[i].append(self.rotate(w["k"][i] @ y, position))
            self.values[i].append((w["v"][i] @ y).reshape(-1, self.size))
            keys, values = np.stack(self.keys[i]), np.stack(self.values[i])
            mixed = []
            for head in range(self.heads):
                group = head // (self.heads // self.kv)
                scores = np.exp(keys[:, group] @ q[head] / np.sqrt(self.size))
                mixed.append(scores / scores.sum() @ values[:, group])
            x = x + w["o"][i] @ np.concatenate(mixed)
            y = self.norm(x, w["norm2"][i])
            gate = w["w1"][i] @ y
            x = x + w["w2"][i] @ (gate / (1 + np.exp(-gate)) * (w["w3"][i] @ y))
        return w["embed"] @ self.norm(x, w["norm"])


def reference_encode(path: Path, text: str) -> list[int]:
    """llama2.c's own procedure: a space, characters or their bytes, then the best-scored pair until none is left."""
    data, at, pieces, scores = path.read_bytes(), 4, [], []
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at)
        pieces.append(data[at + 8 : at + 8 + length].decode())
        scores.append(score)
        at += 8 + length
    lookup = {piece: i for i, piece in enumerate(pieces)}
    ids = [lookup[" "]] if text else []
    for character in text:
        ids += [lookup[character]] if character in lookup else [byte + 3 for byte in character.encode()]
    while True:
        pairs = [(pieces[a] + pieces[b], i) for i, (a, b) in enumerate(zip(ids, ids[1:], strict=False))]
        found = [(scores[lookup[merged]], -i, lookup[merged]) for merged, i in pairs if merged in lookup]
        if not found:
            return [1, *ids]
        _, i, token = max(found)
        ids[-i : -i + 2] = [token]


def test_golden_continuation(checkpoint: Path, tmp_path: Path) -> None:
    target = load_target(f"llama2c:{checkpoint}", cache_dir=tmp_path)
    ids = target.tokenizer.encode(PROMPT)
    reference, logits = Reference(checkpoint), []
    sequence = list(ids)
    for position in range(len(ids) + 40):
        logits.append(reference.step(sequence[position], position))
        if position >= len(ids) - 1:
            sequence.append(int(logits[-1].argmax()))
    ours = full(target, np.asarray([sequence[:-1]]))["logits"][0]
    expected = np.stack(logits)
    assert np.abs(ours - expected).max() / np.abs(expected).max() < 1e-4
    assert ours.argmax(-1)[len(ids) - 1 :].tolist() == sequence[len(ids) :]
    assert target.tokenizer.decode(sequence) == GOLDEN


def test_the_tokenizer_is_that_of_llama2c(checkpoint: Path) -> None:
    path = llama2c.find_tokenizer(checkpoint)
    tokenizer = llama2c.read_tokenizer(path, 512)
    texts = (
        PROMPT,
        "Lily and Tom went to the park.\nThey saw a big dog!",
        "  two spaces, 12345 & \u20ac \u6f22\u5b57 <s> x",
        "zzz qqq Xylophone",
        "a",
    )
    for text in texts:
        plain = text.replace("<s>", "")
        ids = tokenizer.encode(plain)
        assert ids == reference_encode(path, plain)
        assert tokenizer.decode(ids) == plain


def test_damaged_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    content = checkpoint.read_bytes()
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    with pytest.raises(FileNotFoundError, match="expected one tok.*bin beside .*, found none"):
        load_target(f"llama2c:{path}", cache_dir=tmp_path / "cache")
    (tmp_path / "tok512.bin").write_bytes(llama2c.find_tokenizer(checkpoint).read_bytes()[:-100])
    with pytest.raises(ValueError, match="tok512.bin is truncated: it ends within piece 501 of 512"):
        load_target(f"llama2c:{path}", cache_dir=tmp_path / "cache")
    path.write_bytes(content[:-4])
    with pytest.raises(ValueError, match="model.bin holds 264127 weights, and its header describes 264128"):
        load_target(f"llama2c:{path}", cache_dir=tmp_path / "cache")
    path.write_bytes(b"\0" * 64)
    with pytest.raises(ValueError, match="does not begin with a llama2.c version 0 header"):
        load_target(f"llama2c:{path}", cache_dir=tmp_path / "cache")
    path.write_bytes(content[:9])
    with pytest.raises(ValueError, match="truncated: 9 bytes"):
        load_target(f"llama2c:{path}", cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
