"""The `speculators` library's own forward pass over a head that is written here, in an environment of its own.

The environment is made with pip (some 3 GB) unless SPECULATORS_PYTHON names an interpreter that has the library.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.drafters import SavedDrafter
from specjax.checkpoints.formats import read_head, write_head
from specjax.models import merge
from specjax.models.eagle import Eagle3Config, assemble, draft_layer, init_feature_layer
from specjax.testing import tiny_target

REQUIREMENTS = ("speculators==0.9.*", "torchvision", "datasets<=5.1", "transformers<=5.19")
DRAFT, LENGTH, STEPS, TAPS = 40, 24, 3, (2, 4, 5)
SCRIPT = """
import sys
import numpy as np, torch
from safetensors.torch import load_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

head, given, out, steps = sys.argv[1:]
config = Eagle3SpeculatorConfig.from_pretrained(head)
config.transformer_layer_config._attn_implementation = "eager"
model = Eagle3DraftModel(config).float().eval()
found = model.load_state_dict(load_file(f"{head}/model.safetensors"), strict=False)
assert not found.unexpected_keys, found.unexpected_keys
assert set(found.missing_keys) <= {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}, found
given = {name: torch.tensor(value) for name, value in np.load(given).items()}
model.embed_tokens.weight.data.copy_(given.pop("embedding"))
said = []
model.lm_head.register_forward_hook(lambda module, inputs, output: said.append(output.detach()))
with torch.no_grad():
    model(**given, ttt_steps=int(steps))
np.save(out, torch.cat(said).numpy())
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    if named := os.environ.get("SPECULATORS_PYTHON"):
        return named
    folder = tmp_path_factory.mktemp("speculators")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    made = str(folder / "bin" / "python")
    run = subprocess.run([made, "-m", "pip", "install", "--quiet", *REQUIREMENTS], capture_output=True, text=True)
    if run.returncode:
        pytest.skip(f"speculators could not be installed: {(run.stderr.strip().splitlines() or ['no reason'])[-1]}")
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    "switches", [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_fc": True, "norm_before_residual": True}]
)
def test_speculators_says_what_we_say(tmp_path: Path, python: str, switches: dict) -> None:
    target = tiny_target(layers=8)
    layer = draft_layer(target.config, intermediate_size=48, head_size=DRAFT)
    config = Eagle3Config(layer=layer, taps=TAPS, target_hidden_size=target.config.hidden_size, **switches)
    leaves, structure = jax.tree.flatten(init_feature_layer(config, jax.random.key(0)))
    # Norms that are not all ones.
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [x + 0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    vocab = {"vocab": jnp.asarray(np.arange(0, 3 * DRAFT, 3), jnp.int32)}
    saved = SavedDrafter("eagle3", config, jax.tree.unflatten(structure, drawn), vocab, ("embed", "head"))
    write_head(tmp_path / "head", saved, target, "speculators", "float32")
    head = read_head(tmp_path / "head", target)

    rng = np.random.default_rng(2)
    tokens = rng.integers(0, target.config.vocab_size, (1, LENGTH))
    segments = np.repeat([1, 2], (10, LENGTH - 10))[None]
    positions = np.concatenate([np.arange(10), np.arange(LENGTH - 10)])[None]
    taps = rng.normal(size=(len(TAPS), 1, LENGTH, target.config.hidden_size)).astype(np.float32)
    net = assemble(head.config, head.params, merge(target.graph, target.params))
    features = net.fuse(dict(zip(TAPS, jnp.asarray(taps), strict=True)))
    arrays = (jnp.asarray(x) for x in (tokens, features, positions, segments))
    ours = np.concatenate([net.logits(hidden) for hidden in net.unrolled(*arrays, STEPS)[1]])

    given = {
        "hidden_states": np.concatenate(list(taps), axis=-1),
        "input_ids": np.concatenate([tokens[:, 1:], np.zeros((1, 1), tokens.dtype)], axis=1),  # of the token to come
        "document_ids": segments,
        "embedding": np.asarray(target.params["embed"]["embedding"]),
    }
    np.savez(tmp_path / "given.npz", **given)
    command = [
        python,
        "-c",
        SCRIPT,
        *map(str, (tmp_path / "head", tmp_path / "given.npz", tmp_path / "out.npy", STEPS)),
    ]
    run = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": ""}
    )
    assert run.returncode == 0, run.stderr[-2000:]
    theirs = np.load(tmp_path / "out.npy")
    # Behind the end of a text neither reads a token of it.
    inside = slice(0, LENGTH - STEPS - 1)
    assert ours.shape == theirs.shape == (STEPS, LENGTH, DRAFT)
    np.testing.assert_allclose(ours[:, inside], theirs[:, inside], rtol=1e-4, atol=1e-4)
