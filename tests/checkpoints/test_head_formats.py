"""Medusa and Hydra heads of other projects: synthetic tensors, forward passes stated in torch, round trips, errors."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.drafters import SavedDrafter, load_drafter, save_drafter, target_head
from specjax.checkpoints.formats import read_head
from specjax.checkpoints.formats.hydra import read_hydra, write_hydra
from specjax.checkpoints.formats.medusa import read_medusa, write_medusa
from specjax.checkpoints.formats.tensors import BFLOAT16, read_tensors, write_tensors
from specjax.models import merge
from specjax.models.families import config_to_hf
from specjax.models.medusa import HydraConfig, MedusaConfig, heads_graph
from specjax.testing import tiny_target

HEADS, LAYERS = 3, 2
MAP = [7, 3, 250, 11, 0]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def drawn(rng, *shape):
    """Values that bfloat16 holds."""
    return (rng.normal(size=shape) * 0.3).astype(BFLOAT16).astype(np.float32)


def medusa_file(target, layout, *, bias=True, rows=None, prefix="", alike=False):
    rng, d = np.random.default_rng(0), target.config.hidden_size
    rows = rows or target.config.vocab_size
    tensors = {}
    for i in range(HEADS):
        for j in range(LAYERS):
            name = f"{i}.{j}.linear" if layout == "medusa" else f"blocks.{i}.layers.{j}"
            first = f"{i}.0.linear" if layout == "medusa" else f"blocks.{i}.layers.0"
            shared = j > 0 and (alike or layout == "medusa")  # as the authors' code has it: one block, run again
            tensors[f"{name}.weight"] = tensors[f"{first}.weight"] if shared else drawn(rng, d, d)
            if bias:
                tensors[f"{name}.bias"] = tensors[f"{first}.bias"] if shared else drawn(rng, d)
        tensors[f"{i}.{LAYERS}.weight" if layout == "medusa" else f"lm_heads.{i}.weight"] = drawn(rng, rows, d)
    return {prefix + name: value for name, value in tensors.items()}


def hydra_file(target, dropout=False):
    rng, d, v = np.random.default_rng(1), target.config.hidden_size, target.config.vocab_size
    tensors = {}
    for i in range(HEADS):
        for j in range(LAYERS):
            name = f"hydra_mlp.{i}.{2 * j + 1 if dropout else j}"
            inputs = d * (i + 2) if j == 0 else d
            for role in ("linear", "res_connection") if j == 0 else ("linear",):
                tensors |= {f"{name}.{role}.weight": drawn(rng, d, inputs), f"{name}.{role}.bias": drawn(rng, d)}
        head = f"hydra_lm_head.{i}.1" if dropout else f"hydra_lm_head.{i}"
        tensors |= {f"{head}.weight": drawn(rng, v, d), f"{head}.bias": drawn(rng, v)}
    return tensors


def write(directory, tensors, config=None, file="model.safetensors"):
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / file, tensors)
    (directory / "config.json").write_text(json.dumps(config or {}))
    return directory


def said_by(saved, hidden, embeddings=None):
    """Logits `[K, n, Vd]` of the loaded heads."""
    network = merge(heads_graph(saved.config)[0], saved.params)
    if saved.method == "medusa":
        return np.asarray(network.logits(network(jnp.asarray(hidden)))).swapaxes(0, 1)
    read, out = jnp.asarray(hidden), []
    for i in range(saved.config.num_heads):
        read = jnp.concatenate([read, network.read(jnp.asarray(embeddings[i]))], axis=-1)
        out.append(network.logits(i, network(i, read)))
    return np.asarray(out)


def torch_medusa(tensors, hidden):
    """The heads of the paper, in torch: x + SiLU(W x + b), then a product."""
    torch = pytest.importorskip("torch")
    said = []
    for i in range(HEADS):
        x = torch.tensor(hidden)
        for j in range(LAYERS):
            linear = torch.nn.Linear(*reversed(tensors[f"{i}.{j}.linear.weight"].shape))
            linear.load_state_dict({n: torch.tensor(tensors[f"{i}.{j}.linear.{n}"]) for n in ("weight", "bias")})
            x = x + torch.nn.functional.silu(linear(x))
        said.append((x @ torch.tensor(tensors[f"{i}.{LAYERS}.weight"]).T).detach().numpy())
    return np.stack(said)


def torch_hydra(tensors, hidden, embeddings):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional

    def apply(name, x):
        return functional.linear(x, torch.tensor(tensors[f"{name}.weight"]), torch.tensor(tensors[f"{name}.bias"]))

    said = []
    for i in range(HEADS):
        x = torch.cat([torch.tensor(hidden), *(torch.tensor(e) for e in embeddings[: i + 1])], -1)
        x = apply(f"hydra_mlp.{i}.0.res_connection", x) + functional.silu(apply(f"hydra_mlp.{i}.0.linear", x))
        for j in range(1, LAYERS):
            x = x + functional.silu(apply(f"hydra_mlp.{i}.{j}.linear", x))
        said.append(apply(f"hydra_lm_head.{i}", x).numpy())
    return np.stack(said)


def activations(target, seed=2):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(5, target.config.hidden_size)).astype(np.float32), rng.normal(
        size=(HEADS, 5, target.config.hidden_size)
    ).astype(np.float32)


def same(a, b):
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=False))
    equal = all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)
    return jax.tree.structure(a) == jax.tree.structure(b) and equal


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_medusa_heads_say_what_they_say_in_torch(target, tmp_path, prefix):
    tensors = medusa_file(target, "medusa", prefix=prefix)
    other = {"model.norm.weight": np.ones(4, np.float32)} if prefix else {}
    saved = read_medusa(write(tmp_path, tensors | other, {"medusa_num_heads": 2}), target)
    hidden, _ = activations(target)
    plain = {name.removeprefix(prefix): value for name, value in tensors.items()}
    np.testing.assert_allclose(said_by(saved, hidden), torch_medusa(plain, hidden), rtol=1e-4, atol=1e-4)
    # The file counts, not its config; what is no head is named.
    assert (saved.config.num_heads, saved.config.num_layers, saved.shares) == (HEADS, LAYERS, ())
    assert saved.info["config"] == {"medusa_num_heads": 2} and saved.info["unused"] == sorted(other)


def test_hydra_heads_say_what_they_say_in_torch(target, tmp_path):
    tensors = hydra_file(target)
    saved = read_hydra(write(tmp_path / "a", tensors, {"hydra_head_arch": "mlp"}), target)
    hidden, embeddings = activations(target)
    expected = torch_hydra(tensors, hidden, embeddings)
    np.testing.assert_allclose(said_by(saved, hidden, embeddings), expected, rtol=1e-4, atol=1e-4)
    # Dropout leaves gaps in the numbering, and nothing else.
    again = read_hydra(write(tmp_path / "b", hydra_file(target, dropout=True)), target)
    assert same(again.params, saved.params)


@pytest.mark.parametrize("bias", [False, True])
def test_vllm_heads_with_a_token_map(target, tmp_path, bias):
    tensors = medusa_file(target, "vllm", bias=bias, rows=len(MAP)) | {"token_map": np.asarray(MAP)}
    saved = read_medusa(write(tmp_path, tensors, {"truncated_vocab_size": len(MAP)}), target)
    assert saved.config.bias == bias and saved.config.head_size == len(MAP)
    assert saved.tables["vocab"].tolist() == sorted(MAP)
    # Rows move with their ids.
    for i in range(HEADS):
        kernel = np.asarray(saved.params["heads"][i]["lm_head"]["kernel"]).T
        np.testing.assert_array_equal(kernel, tensors[f"lm_heads.{i}.weight"][np.argsort(MAP)])
    # Whole matrices beside a map are cut to it.
    whole = medusa_file(target, "vllm", bias=bias) | {"token_map": np.asarray(MAP)}
    cut = read_medusa(write(tmp_path / "whole", whole), target)
    kernel = np.asarray(cut.params["heads"][1]["lm_head"]["kernel"]).T
    np.testing.assert_array_equal(kernel, whole["lm_heads.1.weight"][sorted(MAP)])


@pytest.mark.parametrize("layout", ["medusa", "vllm"])
def test_medusa_round_trip(target, tmp_path, layout):
    tensors = medusa_file(target, layout)
    saved = read_medusa(write(tmp_path / "a", tensors), target)
    files = write_medusa(tmp_path / "b", saved, target, layout)
    written = read_tensors(tmp_path / "b" / files[0])
    assert written.keys() == tensors.keys()
    assert all(np.array_equal(written[name].astype(np.float32), value) for name, value in tensors.items())
    assert same(read_medusa(tmp_path / "b", target).params, saved.params)
    # And through our own format.
    save_drafter(tmp_path / "c", saved, target)
    assert same(load_drafter(tmp_path / "c", target).params, saved.params)


def test_hydra_round_trip(target, tmp_path):
    tensors = hydra_file(target)
    saved = read_hydra(write(tmp_path / "a", tensors), target)
    files = write_hydra(tmp_path / "b", saved, target)
    written = read_tensors(tmp_path / "b" / files[0])
    assert written.keys() == tensors.keys()
    assert all(np.array_equal(written[name].astype(np.float32), value) for name, value in tensors.items())
    save_drafter(tmp_path / "c", saved, target)
    assert same(load_drafter(tmp_path / "c", target).params, saved.params)


def test_a_whole_model_in_parts_gives_its_heads(target, tmp_path):
    tensors = medusa_file(target, "medusa", prefix="medusa_head.")
    saved = read_medusa(write(tmp_path / "one", tensors), target)
    # Never read: it would be refused.
    whole = tensors | {"model.norm.weight": np.full(4, np.nan, np.float32)}
    names = sorted(whole)
    parts = {f"model-0000{i}-of-00002.safetensors": names[i - 1 :: 2] for i in (1, 2)}
    for file, part in parts.items():
        write(tmp_path / "parts", {name: whole[name] for name in part}, {"medusa_num_heads": HEADS}, file)
    index = tmp_path / "parts" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, part in parts.items() for name in part}}))
    found = read_head(tmp_path / "parts", target)
    assert same(found.params, saved.params) and found.info["unused"] == ["model.norm.weight"]
    (tmp_path / "parts" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="index.json lists model-00002-of-00002.safetensors, which .* not have"):
        read_head(tmp_path / "parts", target)


def test_vllm_heads_are_known_by_their_config(target, tmp_path):
    tensors = medusa_file(target, "vllm", rows=len(MAP)) | {"token_map": np.asarray(MAP)}
    config = {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": HEADS, "logit_scale": 2.0}
    found = read_head(write(tmp_path / "a", tensors, config), target)
    assert found.method == "medusa" and found.info["config_unused"] == ["logit_scale"]
    again = read_head(write(tmp_path / "b", tensors, config | {"truncated_vocab_size": None}), target)
    assert same(again.params, found.params) and again.tables["vocab"].tolist() == sorted(MAP)


def test_hydra_plus_plus_says_what_it_says_in_torch(target, tmp_path):
    """The prefix is a model of one layer, as transformers has it, over the hidden states."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    layer = config_to_hf(target.config.with_layers((0,)))
    model = transformers.LlamaModel(transformers.LlamaConfig(**{k: layer[k] for k in layer if k != "torch_dtype"}))
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.tensor(drawn(np.random.default_rng(value.numel()), *value.shape)))
    prefix = {f"prefix_embeding_layer.{name}": value.numpy() for name, value in model.state_dict().items()}
    tensors = hydra_file(target, dropout=True) | prefix
    config = {"hydra_head_arch": "prefix-mlp", "grounded_heads": True, "hydra_num_heads": HEADS, "strange": 1}
    saved = read_head(write(tmp_path / "a", tensors, config), target)
    assert saved.info["unused"] == ["prefix_embeding_layer.embed_tokens.weight"]
    assert saved.info["config_unused"] == ["strange"]
    hidden = np.random.default_rng(5).normal(size=(1, 6, target.config.hidden_size)).astype(np.float32)
    network = merge(heads_graph(saved.config)[0], saved.params)
    ours = network.prefix.full(jnp.asarray(hidden), jnp.arange(6)[None], jnp.ones((1, 6), jnp.int32))
    with torch.no_grad():
        theirs = model(inputs_embeds=torch.tensor(hidden))[0]
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=1e-4)
    # Back under the same names, dropout counted.
    files = write_hydra(tmp_path / "b", saved, target)
    written = read_tensors(tmp_path / "b" / files[0])
    assert written.keys() == tensors.keys() - set(saved.info["unused"])
    assert same(read_head(tmp_path / "b", target).params, saved.params)


def sharing(target, method, **changes):
    """Heads as they are trained here: the target's head rows of a draft vocabulary."""
    vocab = jnp.asarray(sorted(MAP), jnp.int32)
    kind = MedusaConfig if method == "medusa" else HydraConfig
    shapes = {"hidden_size": target.config.hidden_size, "vocab_size": target.config.vocab_size, "head_size": len(MAP)}
    config = kind(**shapes, num_heads=HEADS, num_layers=LAYERS, **changes)
    rng = np.random.default_rng(3)
    params = jax.tree.map(lambda x: jnp.asarray(drawn(rng, *x.shape)), heads_graph(config)[1])
    params["lm_head"] = {"kernel": target_head(target.config, target.params, vocab)}
    if method == "medusa":  # alike, as FasterDecoding's code would run them
        for head in params["heads"].values():
            head["blocks"][1] = head["blocks"][0]
    shares = ("head",) if method == "medusa" else ("embed", "head")
    return SavedDrafter(method, config, params, {"vocab": vocab}, shares, {"note": "made for a test"})


def test_shared_heads_travel(target, tmp_path):
    ours, (hidden, embeddings) = sharing(target, "medusa"), activations(target)
    mine = said_by(ours, hidden)
    write_medusa(tmp_path / "vllm", ours, target, "vllm")
    described = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert described["original_lm_head"] and described["truncated_vocab_size"] == len(MAP)
    there = read_medusa(tmp_path / "vllm", target)
    np.testing.assert_allclose(said_by(there, hidden), mine, rtol=2e-2, atol=2e-2)  # the head rows in bfloat16
    assert there.tables["vocab"].tolist() == sorted(MAP)
    # Without a reduced vocabulary the same tokens keep the same logits.
    write_medusa(tmp_path / "v0", ours, target, "medusa")
    whole = said_by(read_medusa(tmp_path / "v0", target), hidden)
    assert whole.shape[-1] == target.config.vocab_size
    np.testing.assert_allclose(whole[..., sorted(MAP)], mine, rtol=2e-2, atol=2e-2)
    # Hydra's compact form is the published one written shorter.
    short = sharing(target, "hydra", embed_rank=8, residual="hidden")
    write_hydra(tmp_path / "hydra", short, target)
    long = said_by(read_hydra(tmp_path / "hydra", target), hidden, embeddings)[..., sorted(MAP)]
    np.testing.assert_allclose(long, said_by(short, hidden, embeddings), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("medusa", {}),
        ("hydra", {"embed_rank": 8, "residual": "hidden"}),
        ("hydra", {"prefix": tiny_target(layers=1).config}),
    ],
)
def test_shared_heads_come_back_from_our_own_format(target, tmp_path, method, changes):
    ours = sharing(target, method, ranks=4, **changes)
    ours.tables["accuracy"] = jnp.asarray(np.full((HEADS, 4), 0.25, np.float32))
    save_drafter(tmp_path, ours, target)
    found = load_drafter(tmp_path, target)
    assert found.config == ours.config and same(found.params, ours.params)
    assert found.tables["accuracy"].dtype == jnp.float32 and same(found.tables["accuracy"], ours.tables["accuracy"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("1.0.linear.bias"), "some blocks have|bias"),
        (lambda t: t.pop("1.2.weight"), "missing vocabulary matrix of head 1"),
        (lambda t: t.pop("2.0.linear.weight"), "missing weight of block 0 of head 2"),
        (lambda t: t.update({"what.is.this": np.zeros(2, np.float32)}), "unexpected tensors: what.is.this"),
        (lambda t: t.update({"0.0.linear.weight": np.zeros((32, 31), np.float32)}), r"shape \[32, 31\]"),
        (lambda t: t.update({"0.2.weight": np.full((259, 32), np.nan, np.float32)}), "NaN or infinity in 0.2.weight"),
        (lambda t: t.clear() or t.update(x=np.zeros(2, np.float32)), "holds no Medusa heads: expected tensors such as"),
    ],
)
def test_medusa_files_that_cannot_be_are_refused(target, tmp_path, change, says):
    tensors = medusa_file(target, "medusa")
    change(tensors)
    with pytest.raises(ValueError, match=says):
        read_medusa(write(tmp_path, tensors), target)


def test_heads_of_another_target_are_refused(target, tmp_path):
    wide = tiny_target(width=48)
    with pytest.raises(ValueError, match="heads of width 48 for a target of 32: another target's heads"):
        read_medusa(write(tmp_path / "a", medusa_file(wide, "medusa")), target)
    with pytest.raises(ValueError, match="matrices of 100 rows for a target of 259 tokens, and no token_map"):
        read_medusa(write(tmp_path / "b", medusa_file(target, "vllm", rows=100)), target)
    twice = medusa_file(target, "vllm", rows=5) | {"token_map": np.asarray([1, 1, 2, 3, 4])}
    with pytest.raises(ValueError, match="token_map of shape.*expected different ids from 0 to 258"):
        read_medusa(write(tmp_path / "c", twice), target)
    with pytest.raises(ValueError, match="config says truncated_vocab_size=9, token_map has 5 ids"):
        read_medusa(write(tmp_path / "d", twice | {"token_map": np.asarray(MAP)}, {"truncated_vocab_size": 9}), target)
    with pytest.raises(ValueError, match=r"hydra_mlp.0.0.linear.weight has shape \[48, 96\], expected \[32, 64\]"):
        read_hydra(write(tmp_path / "e", hydra_file(wide)), target)


@pytest.mark.parametrize(
    ("config", "change", "says"),
    [
        ({"hydra_head_arch": "eagle"}, {}, "hydra_head_arch='eagle' is not read; expected mlp or prefix-mlp"),
        ({"grounded_heads": False}, {}, "grounded_heads=false"),
        ({"hidden_state_offset": 1}, {}, "hidden_state_offset=1 is not read"),
        (
            {},
            {"prefix_embeding_layer.norm.weight": np.ones(32, np.float32)},
            "missing prefix_embeding_layer.layers.0.mlp",
        ),
        ({"hydra_head_arch": "prefix-mlp"}, {}, "has no tensors of a prefix layer"),
        ({}, {"other": np.ones(32, np.float32)}, "unexpected tensors: other"),
        ({}, {"hydra_lm_head.0.bias": None}, "missing hydra_lm_head.0.bias"),
        ({}, {"hydra_mlp.2.1.linear.weight": None, "hydra_mlp.2.1.linear.bias": None}, "head 2 has 1 blocks, head 0 2"),
    ],
)
def test_hydra_files_that_cannot_be_are_refused(target, tmp_path, config, change, says):
    tensors = hydra_file(target) | change
    kept = {name: value for name, value in tensors.items() if value is not None}
    with pytest.raises(ValueError, match=says):
        read_hydra(write(tmp_path, kept, config), target)


def test_pickles_are_read_without_their_code(target, tmp_path):
    torch = pytest.importorskip("torch")
    tensors = medusa_file(target, "medusa")
    state = {name: torch.tensor(value).to(torch.bfloat16) for name, value in tensors.items()}
    torch.save(state, tmp_path / "medusa_lm_head.pt")
    saved = read_medusa(tmp_path / "medusa_lm_head.pt", target)
    np.testing.assert_array_equal(saved.params["heads"][2]["lm_head"]["kernel"].T, tensors[f"2.{LAYERS}.weight"])
    torch.save({"code": print}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="holds more than tensors, which is not read because it could run code"):
        read_medusa(tmp_path / "evil.pt", target)
    torch.save({"a": 1}, tmp_path / "number.pt")
    with pytest.raises(ValueError, match="is not a dictionary of tensors"):
        read_medusa(tmp_path / "number.pt", target)
    (tmp_path / "cut.pt").write_bytes((tmp_path / "medusa_lm_head.pt").read_bytes()[:1000])
    with pytest.raises(ValueError, match="is damaged"):
        read_medusa(tmp_path / "cut.pt", target)


def test_their_program_finds_a_bias_and_the_model(target, tmp_path):
    """Their blocks have biases, random where the file gives none, and they load the base model by its name."""
    tensors = {name: x for name, x in medusa_file(target, "vllm", alike=True).items() if not name.endswith("bias")}
    bare = read_medusa(write(tmp_path / "bare", tensors), target)
    assert not bare.config.bias
    write_medusa(tmp_path / "theirs", bare, dataclasses.replace(target, name="smollm2"), "medusa", "float32")
    written = read_tensors(tmp_path / "theirs/medusa_lm_head.safetensors")
    assert written["0.0.linear.bias"].shape == (target.config.hidden_size,) and not written["0.0.linear.bias"].any()
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_what_cannot_be_written_is_refused(target, tmp_path):
    ours = sharing(target, "medusa")
    with pytest.raises(ValueError, match="layout='v9'; expected 'medusa' or 'vllm'"):
        write_medusa(tmp_path, ours, target, "v9")
    with pytest.raises(ValueError, match="a drafter of method 'medusa' cannot be written as one of 'hydra'"):
        write_hydra(tmp_path, ours, target)
    foreign = dataclasses.replace(tiny_target(layers=1).config, qk_norm=True)
    with pytest.raises(ValueError, match="prefix is a plain Llama layer, this one has norms of queries and keys"):
        write_hydra(tmp_path, sharing(target, "hydra", prefix=foreign), target)
    deep = sharing(target, "hydra")
    for head in deep.params["heads"].values():
        head["blocks"][1] = jax.tree.map(jnp.zeros_like, head["blocks"][0])
    deep = dataclasses.replace(deep, config=dataclasses.replace(deep.config, num_layers=3))
    with pytest.raises(
        ValueError, match="num_layers=3: the authors' code runs one block .* of head 0 differ; .* at most 2"
    ):
        write_hydra(tmp_path, deep, target)
    deep = sharing(target, "medusa")
    for head in deep.params["heads"].values():
        head["blocks"][1] = jax.tree.map(jnp.zeros_like, head["blocks"][0])
    with pytest.raises(
        ValueError, match="num_layers=2: the authors' code runs one block .* of head 0 differ; .* at most 1"
    ):
        write_medusa(tmp_path, deep, target, "medusa")
    assert write_medusa(tmp_path / "apart", deep, target, "vllm")
    own = read_medusa(
        write(tmp_path, medusa_file(target, "vllm", rows=5, alike=True) | {"token_map": np.asarray(MAP)}), target
    )
    with pytest.raises(ValueError, match="the layout 'medusa' has no reduced vocabulary"):
        write_medusa(tmp_path, own, target, "medusa")
    with pytest.raises(FileNotFoundError, match="has none of medusa_lm_head.safetensors"):
        (tmp_path / "empty").mkdir()
        read_medusa(tmp_path / "empty", target)
