"""Our reader and writer of safetensors, against the reference implementation."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch

from specjax.checkpoints.safetensors import (
    INDEX,
    SINGLE,
    Spec,
    open_directory,
    read_header,
    write_directory,
    write_file,
)

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.int32, np.uint8, np.bool_)


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {np.dtype(d).name: (rng.standard_normal((3, 5)) * 4).astype(d) for d in DTYPES}
    return made | {"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 4), np.float32)}


def specs(tensors: dict[str, np.ndarray]) -> dict[str, Spec]:
    return {name: Spec(array.shape, array.dtype) for name, array in tensors.items()}


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


def test_files_of_the_reference_implementation_are_read(tmp_path: Path) -> None:
    stored = {
        "bf16": torch.randn(4, 3).to(torch.bfloat16),
        "f16": torch.randn(7).half(),
        "f32": torch.randn(2, 2, 2),
        "i64": torch.arange(5),
        "bool": torch.tensor([True, False]),
        "fp8": torch.randn(8).to(torch.float8_e4m3fn),
    }
    safetensors.torch.save_file(stored, tmp_path / SINGLE, metadata={"format": "pt", "note": "kept out"})
    found = read_header(tmp_path / SINGLE)
    assert set(found) == set(stored)
    for name, tensor in stored.items():
        array = found[name].read()
        assert array.shape == tuple(tensor.shape)
        assert array.tobytes() == tensor.view(torch.uint8).numpy().tobytes()
    assert found["bf16"].dtype == np.dtype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found["bf16"].read().astype(np.float32), stored["bf16"].float().numpy())


def test_the_reference_implementation_reads_ours(tmp_path: Path) -> None:
    made = arrays()
    write_file(tmp_path / SINGLE, specs(made), made.__getitem__)
    found = safetensors.torch.load_file(tmp_path / SINGLE)
    assert set(found) == set(made)
    for name, array in made.items():
        assert tuple(found[name].shape) == array.shape
        assert found[name].reshape(-1).view(torch.uint8).numpy().tobytes() == array.tobytes()


@pytest.mark.parametrize("shard_bytes", [1, 100, 200, 10**9])
def test_shards(shard_bytes: int, tmp_path: Path) -> None:
    made = arrays()
    write_directory(tmp_path, specs(made), made.__getitem__, shard_bytes)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert (tmp_path / INDEX).exists() == (len(files) > 1) == (shard_bytes < 10**9)
    found = open_directory(tmp_path)
    assert set(found) == set(made)
    for name, array in made.items():
        assert_same(found[name].read(), array)
    if len(files) > 1:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(array.nbytes for array in made.values())
        for name, file in index["weight_map"].items():
            assert name in safetensors.torch.load_file(tmp_path / file)


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    made = {f"t{i}": np.full((1024, 256), i, np.float32) for i in range(16)}
    write_file(tmp_path / SINGLE, specs(made), made.__getitem__)
    size = made["t0"].nbytes
    del made
    tracemalloc.start()
    for tensor in read_header(tmp_path / SINGLE).values():
        assert tensor.read()[0, 0] == int(tensor.start > 0) * tensor.read()[1, 1]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * size


def test_what_is_written_must_be_what_was_announced(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="announced as float32\\[2\\] and came as float64\\[2\\]"):
        write_file(tmp_path / SINGLE, {"x": Spec((2,), np.dtype(np.float32))}, lambda _: np.zeros(2))
    with pytest.raises(ValueError, match="x has dtype complex64"):
        write_file(tmp_path / SINGLE, {"x": Spec((2,), np.dtype(np.complex64))}, lambda _: np.zeros(2))


def broken(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / SINGLE
    path.write_bytes(content)
    return path


def test_truncated_files_are_one_clear_error_wherever_they_end(tmp_path: Path) -> None:
    made = arrays()
    write_file(tmp_path / "whole", specs(made), made.__getitem__)
    whole = (tmp_path / "whole").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for end in (0, 5, 8, 20, header - 1, header, header + 10, len(whole) - 1):
        with pytest.raises(ValueError, match="truncated.*fetch it again"):
            read_header(broken(tmp_path, whole[:end]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer.*git lfs pull"),
        ((10).to_bytes(8, "little") + b"not json!!" + b"x" * 8, "damaged safetensors header"),
        ((2).to_bytes(8, "little") + b"[]", "damaged safetensors header"),
        ((9).to_bytes(8, "little") + b'{"a": {}}', "damaged safetensors header"),
    ],
)
def test_files_that_are_no_safetensors(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_header(broken(tmp_path, content))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}, "dtype F4"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "shape \\(2,\\) of F32 in a range of 4 bytes"),
    ],
)
def test_headers_that_contradict_themselves(entry: dict, message: str, tmp_path: Path) -> None:
    text = json.dumps({"a": entry}).encode()
    with pytest.raises(ValueError, match=message):
        read_header(broken(tmp_path, len(text).to_bytes(8, "little") + text + b"0" * 8))


def test_directories_without_weights(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor .*pytorch_model.bin.*convert"):
        open_directory(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_header(tmp_path / "absent.safetensors")


def test_indices_that_promise_too_much(tmp_path: Path) -> None:
    made = arrays()
    write_directory(tmp_path, specs(made), made.__getitem__, 100)
    index = json.loads((tmp_path / INDEX).read_text())
    first = sorted(set(index["weight_map"].values()))[0]
    index["weight_map"]["lost"] = first
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="tensors that no shard holds: lost"):
        open_directory(tmp_path)
    (tmp_path / first).unlink()
    with pytest.raises(FileNotFoundError, match=f"names {first}, which are missing"):
        open_directory(tmp_path)
