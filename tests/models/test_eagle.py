"""EAGLE's networks against forwards written from the papers in torch, pair by pair."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import ModelConfig, RopeConfig, graph, init_decoder, merge, pack
from specjax.models.eagle import (
    Eagle3Config,
    EagleConfig,
    ahead,
    assemble,
    default_taps,
    draft_layer,
    feature_graph,
    head_rows,
    init_feature_layer,
)

VOCAB, WIDTH, LENGTH, STEPS, TAPS = 11, 16, 6, 3, (0, 1, 2)
TARGET = ModelConfig(
    family="llama",
    vocab_size=VOCAB,
    head_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position=64,
    norm_eps=1e-5,
    query_scale=0.5,
    windows=(None,) * 2,
    ropes=(RopeConfig(theta=100.0),) * 2,
    tie_embeddings=True,
)
LAYER = draft_layer(TARGET, intermediate_size=20, head_size=VOCAB)
CONFIGS = {
    "eagle": EagleConfig(layer=LAYER),
    "eagle3": Eagle3Config(layer=LAYER, taps=TAPS, target_hidden_size=WIDTH),
    "eagle3.1": Eagle3Config(layer=LAYER, taps=TAPS, target_hidden_size=WIDTH, fc_norm=True, norm_output=True),
    "speculators": Eagle3Config(
        layer=LAYER, taps=TAPS, target_hidden_size=WIDTH, norm_before_fc=True, norm_before_residual=True
    ),
}


def weights(config):
    """Random, norms and bias included, with the target's embedding and head."""
    params = init_feature_layer(config, jax.random.key(1))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    moved = [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, moved)


class Reference:
    """One head in torch: pairs go in one by one, and every pair sees those before it."""

    def __init__(self, config, params, embedding):
        import torch

        self.torch, self.config = torch, config
        self.p = jax.tree.map(lambda x: torch.tensor(np.asarray(x)), params)
        self.embedding = torch.tensor(np.asarray(embedding))

    def norm(self, x, weight):
        return x * self.torch.rsqrt((x * x).mean(-1, keepdim=True) + LAYER.norm_eps) * weight

    def rope(self, x, position):
        half = x.shape[-1] // 2
        angle = position / 100.0 ** (self.torch.arange(half) * 2 / x.shape[-1])
        cos, sin = self.torch.cos(angle), self.torch.sin(angle)
        a, b = x[..., :half], x[..., half:]
        return self.torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def fuse(self, taps):
        c, torch = self.config, self.torch
        parts = [torch.tensor(np.asarray(taps[tap])) for tap in (c.taps if c is not CONFIGS["eagle"] else ["normed"])]
        if c is CONFIGS["eagle"]:
            return parts[0]
        if c.norm_before_fc:
            parts = self.norm(torch.cat(parts, -1), self.p["input_norm"]["weight"]).chunk(len(parts), -1)
        if c.fc_norm:
            parts = [self.norm(part, self.p["fc_norm"][i]["weight"]) for i, part in enumerate(parts)]
        return torch.cat(list(parts), -1) @ self.p["fc"]["kernel"]

    def pair(self, token, feature, position, cache):
        """The next feature and the logits behind one pair."""
        p, c, torch = self.p, self.config, self.torch
        embed = self.embedding[token]
        if c is CONFIGS["eagle"]:
            x = torch.cat([embed, feature]) @ p["fc"]["kernel"] + p["fc"]["bias"]
            attended = x
        else:
            normed = self.norm(feature, p["hidden_norm"]["weight"])
            attended = torch.cat([self.norm(embed, p["embed_norm"]["weight"]), normed])
            x = normed if c.norm_before_residual else feature
        q, k, v = (attended @ p["attn"][name]["kernel"] for name in "qkv")
        q, k = (self.rope(y.reshape(-1, 4), position) for y in (q, k))
        cache.append((k, v.reshape(-1, 4)))
        heads = []
        for head in range(4):
            scores = torch.stack([q[head] @ key[head // 2] / 2 for key, _ in cache]).softmax(0)
            heads.append(sum(s * value[head // 2] for s, (_, value) in zip(scores, cache, strict=True)))
        x = x + torch.cat(heads) @ p["attn"]["o"]["kernel"]
        y = self.norm(x, p["mlp_norm"]["weight"])
        gate, up = y @ p["mlp"]["gate"]["kernel"], y @ p["mlp"]["up"]["kernel"]
        x = x + (torch.nn.functional.silu(gate) * up) @ p["mlp"]["down"]["kernel"]
        read = x if c is CONFIGS["eagle"] else self.norm(x, p["norm"]["weight"])
        carried = read if getattr(c, "norm_output", False) else x
        return carried, read @ self.embedding.T

    def rollout(self, tokens, taps):
        """`[T, K, V]`: from each position a draft of its own, fed the text."""
        features, cache, logits = self.fuse(taps), [], []
        for t in range(LENGTH):
            carried, out = self.pair(tokens[t + 1], features[t], t, cache)
            own, rows = list(cache), [out]
            for k in range(1, STEPS):
                carried, out = self.pair(tokens[t + 1 + k], carried, t + k, own)
                rows.append(out)
            logits.append(self.torch.stack(rows))
        return self.torch.stack(logits).numpy()


@pytest.mark.parametrize("name", CONFIGS)
def test_rollout_against_a_draft_from_every_position(name):
    pytest.importorskip("torch")
    config, params = CONFIGS[name], weights(CONFIGS[name])
    target = merge(graph(TARGET)[0], init_decoder(TARGET, jax.random.key(0)))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, LENGTH + STEPS)
    taps = {tap: rng.normal(size=(LENGTH, WIDTH)).astype(np.float32) for tap in (*TAPS, "normed")}
    wanted = Reference(config, params, target.embed.embedding[...]).rollout(tokens, taps)

    @jax.jit
    def rollout(params, tokens, taps):
        net = assemble(config, params, target)
        padded = {int(t) if t.isdigit() else t: jnp.pad(x, ((0, STEPS), (0, 0)))[None] for t, x in taps.items()}
        positions = jnp.arange(LENGTH + STEPS)[None]
        _, hidden = net.unrolled(tokens[None], net.fuse(padded), positions, jnp.ones_like(positions), STEPS)
        return jnp.stack([net.logits(h[0, :LENGTH]) for h in hidden], axis=1)

    found = np.asarray(rollout(params, jnp.asarray(tokens), {str(tap): x for tap, x in taps.items()}))
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=1e-4)


def test_ahead():
    x = jnp.arange(8).reshape(2, 4)
    np.testing.assert_array_equal(ahead(x, 1), [[1, 2, 3, 0], [5, 6, 7, 0]])
    np.testing.assert_array_equal(ahead(x, 5), np.zeros((2, 4)))


@pytest.mark.parametrize("tied", [True, False])
def test_a_borrowed_head_is_the_targets_in_every_layout(tied):
    config = dataclasses.replace(TARGET, tie_embeddings=tied)
    params, ids = init_decoder(config, jax.random.key(0)), jnp.asarray([1, 4, 9])
    x = jax.random.normal(jax.random.key(3), (2, WIDTH))
    whole = merge(graph(config)[0], params).logits(x)
    for laid in (params, pack(params)):
        target = merge(graph(config)[0], laid)
        for vocab, wanted in ((None, whole), (ids, whole[:, ids])):
            kernel = head_rows(target, vocab)
            got = x @ (kernel if kernel.ndim == 2 else kernel[0].T)
            np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_the_published_sizes():
    """Leaves and shapes as the papers have them: no input norm in EAGLE-1, 2H-wide attention in EAGLE-3."""
    one, three = (feature_graph(CONFIGS[name])[1] for name in ("eagle", "eagle3"))
    assert set(one) == {"embed", "lm_head", "fc", "attn", "mlp_norm", "mlp"}
    assert one["fc"]["kernel"].shape == (2 * WIDTH, WIDTH) and one["fc"]["bias"].shape == (WIDTH,)
    assert set(three) == {"embed", "lm_head", "fc", "attn", "mlp_norm", "mlp", "embed_norm", "hidden_norm", "norm"}
    assert three["fc"]["kernel"].shape == (3 * WIDTH, WIDTH) and "bias" not in three["fc"]
    assert three["attn"]["q"]["kernel"].shape == (2 * WIDTH, WIDTH)


def test_bad_configs_are_refused():
    assert default_taps(30) == (2, 15, 27)
    with pytest.raises(ValueError, match="target of 5 layers is too shallow"):
        default_taps(5)
    two = dataclasses.replace(LAYER, num_layers=2, windows=(None,) * 2, ropes=LAYER.ropes * 2)
    with pytest.raises(ValueError, match="num_layers=2; EAGLE's network has 1"):
        EagleConfig(layer=two)
    with pytest.raises(ValueError, match=r"taps=\(\): expected target layers"):
        Eagle3Config(layer=LAYER, taps=(), target_hidden_size=WIDTH)
