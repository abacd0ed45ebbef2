"""Training steps stated in torch, to hold ours against: distillation, Medusa-1, Hydra, EAGLE-1 and EAGLE-3.

Plain eager torch, as the methods' own trainers are written: all logits of a batch at once, automatic differentiation,
AdamW. Rows hold one document each, which needs no mask between documents. Weights begin as ours do, so that the losses
can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

STEPS = ("distill", "eagle", "eagle3", "hydra", "medusa")
Params = dict[str, Any]  # of torch tensors, by path


def run(
    name: str,
    start: Mapping[str, np.ndarray],
    data: Mapping[str, np.ndarray],
    shapes: Mapping[str, Any],
    optimizer: Mapping[str, float],
    steps: int,
    held: Callable[[], int],
) -> dict[str, Any]:
    """Trains for 1 + `steps` updates.

    Args:
        name: of `STEPS`.
        start: our parameters by path, matrices `[in, out]`.
        data: a batch with `normed`, `lse`, `vocab`, `head`, `embed`, and taps as `tap_<n>`.
        shapes: see `specjax_shapes` in `_train_costs`.
        optimizer: `learning_rate`, `b1`, `b2`, `weight_decay`, `clip`.
        steps: that are timed.
        held: gives the bytes that the process holds; asked before the first update.

    Returns:
        Bytes held before the first update, the seconds of each timed one, and the losses of all.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = {key: torch.tensor(value, device=device) for key, value in data.items()}
    params = {path: torch.nn.Parameter(_theirs(path, value).to(device)) for path, value in start.items()}
    matrices = [p for p in params.values() if p.ndim > 1]
    rest = [p for p in params.values() if p.ndim <= 1]
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": optimizer["weight_decay"]}, {"params": rest, "weight_decay": 0.0}],
        lr=optimizer["learning_rate"],
        betas=(optimizer["b1"], optimizer["b2"]),
    )
    losses_of = {"distill": _distill, "eagle": _eagle, "eagle3": _eagle3, "hydra": _hydra, "medusa": _medusa}
    loss_of = losses_of[name]
    before, seconds, losses = held(), [], []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(1 + steps):
        begun = time.perf_counter()
        adamw.zero_grad(set_to_none=True)
        loss = loss_of(params, batch, shapes)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params.values(), optimizer["clip"])
        adamw.step()
        losses.append(float(loss.detach()))  # Waits for the device.
        seconds.append(time.perf_counter() - begun)
    peak = {"device_peak": torch.cuda.max_memory_allocated()} if device == "cuda" else {}
    return {"before": before, "seconds": seconds[1:], "losses": losses, **peak}


def _theirs(path: str, value: np.ndarray) -> Any:
    import torch

    return torch.tensor(np.ascontiguousarray(value.T if path.endswith("kernel") else value), dtype=torch.float32)


def _linear(params: Params, name: str, x: Any) -> Any:
    import torch

    return torch.nn.functional.linear(x, params[f"{name}/kernel"], params.get(f"{name}/bias"))


def _norm(params: Params, name: str, x: Any, eps: float) -> Any:
    import torch

    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * params[f"{name}/weight"]


def _mlp(params: Params, name: str, x: Any) -> Any:
    import torch

    gate = torch.nn.functional.silu(_linear(params, f"{name}/gate", x))
    return _linear(params, f"{name}/down", gate * _linear(params, f"{name}/up", x))


def _rotate(x: Any, positions: Any, frequencies: Sequence[float]) -> Any:
    import torch

    angles = positions[..., None, None].float() * torch.tensor(frequencies, device=x.device)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def _heads(params: Params, name: str, x: Any, positions: Any, shapes: Mapping[str, Any], at: int) -> tuple[Any, ...]:
    """Scaled queries, keys and values `[B, T, heads, H]`, keys and values repeated for the queries' groups."""
    width, groups = shapes["head_dim"], shapes["heads"] // shapes["kv_heads"]
    q, k, v = (_linear(params, f"{name}/{part}", x).unflatten(-1, (-1, width)) for part in "qkv")
    q, k = (_rotate(part, positions, shapes["frequencies"][at]) for part in (q, k))
    return q * shapes["scale"], k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)


def _attention(q: Any, keys: list[Any], values: list[Any]) -> Any:
    """To the first keys under the causal mask, to each later ones at the same index only."""
    import torch

    length = q.shape[1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = [torch.einsum("btnh,bsnh->bnts", q, keys[0]).masked_fill(hidden, float("-inf"))]
    scores += [torch.einsum("btnh,btnh->bnt", q, k)[..., None] for k in keys[1:]]
    weights = torch.cat(scores, -1).softmax(-1)
    out = torch.einsum("bnts,bsnh->btnh", weights[..., :length], values[0])
    for i, v in enumerate(values[1:]):
        out = out + weights[..., length + i].transpose(1, 2)[..., None] * v
    return out.flatten(2)


def _ahead(x: Any, steps: int) -> Any:
    """What stood `steps` later; zeros behind the end."""
    import torch

    return torch.cat([x[:, steps:], torch.zeros_like(x[:, :steps])], 1)


def _predicts(batch: Mapping[str, Any]) -> Any:
    same = (_ahead(batch["segments"], 1) == batch["segments"]) & (batch["segments"] > 0)
    return same & _ahead(batch["response"], 1)


def _law(batch: Mapping[str, Any], steps: int, where: Any) -> Any:
    """The target's log-probabilities `[n, Vd]` of the draft vocabulary, `steps` behind the chosen positions."""
    normed, lse = _ahead(batch["normed"], steps)[where], _ahead(batch["lse"], steps)[where]
    return normed @ batch["head"] - lse[:, None]


def _labels(batch: Mapping[str, Any]) -> tuple[Any, Any]:
    """Draft id of the next token, and whether it has one."""
    import torch

    following = _ahead(batch["tokens"], 1)
    index = torch.searchsorted(batch["vocab"], following).clamp(max=len(batch["vocab"]) - 1)
    return index, batch["vocab"][index] == following


def _distill(params: Params, batch: Mapping[str, Any], shapes: Mapping[str, Any]) -> Any:
    eps, x = shapes["eps"], batch["embed"][batch["tokens"]]
    for i in range(len(shapes["frequencies"])):
        layer = f"layers/{i}"
        inner = _norm(params, f"{layer}/attn_norm", x, eps)
        q, k, v = _heads(params, f"{layer}/attn", inner, batch["positions"], shapes, i)
        x = x + _linear(params, f"{layer}/attn/o", _attention(q, [k], [v]))
        x = x + _mlp(params, f"{layer}/mlp", _norm(params, f"{layer}/mlp_norm", x, eps))
    where = _predicts(batch)
    log_q = (_norm(params, "final_norm", x, eps)[where] @ batch["head"]).log_softmax(-1)
    log_p = _law(batch, 0, where)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def _medusa(params: Params, batch: Mapping[str, Any], shapes: Mapping[str, Any]) -> Any:
    return _heads_loss(lambda i, mask: _blocks(params, f"heads/{i}", batch["normed"][mask]), batch, shapes)


def _hydra(params: Params, batch: Mapping[str, Any], shapes: Mapping[str, Any]) -> Any:
    import torch

    read = batch["embed"][batch["tokens"]]
    read = _linear(params, "embed_in", read) if "embed_in/kernel" in params else read

    def head(i: int, mask: Any) -> Any:
        name = f"heads/{i}/grounded"
        normed = batch["normed"]
        x = torch.cat([normed, *(_ahead(read, k + 1) for k in range(i + 1))], -1)[mask]
        kept = _linear(params, f"{name}/residual", x) if f"{name}/residual/kernel" in params else normed[mask]
        return _blocks(params, f"heads/{i}", kept + torch.nn.functional.silu(_linear(params, f"{name}/linear", x)))

    return _heads_loss(head, batch, shapes)


def _blocks(params: Params, name: str, x: Any) -> Any:
    import torch

    for j in range(sum(path.startswith(f"{name}/blocks/") and path.endswith("/kernel") for path in params)):
        x = x + torch.nn.functional.silu(_linear(params, f"{name}/blocks/{j}/linear", x))
    return x


def _heads_loss(head: Callable[[int, Any], Any], batch: Mapping[str, Any], shapes: Mapping[str, Any]) -> Any:
    """Weighted mean of each head's own mean, of what it gives to the vocabulary product at its positions."""
    predicts, (index, inside) = _predicts(batch), _labels(batch)
    mask, total, weight = predicts, 0.0, 0.0
    for i in range(shapes["num_heads"]):
        mask = mask & _ahead(predicts, i + 1)
        log_q, known = (head(i, mask) @ batch["head"]).log_softmax(-1), _ahead(inside, i + 1)[mask]
        nll = -log_q.gather(-1, _ahead(index, i + 1)[mask][:, None])[:, 0]
        soft = -(_law(batch, i + 1, mask).exp() * log_q).sum(-1)
        share, scale = shapes["teacher"], shapes["decay"] ** i
        mean = ((1 - share) * nll * known + share * soft).sum() / ((1 - share) * known + share).sum()
        total, weight = total + scale * mean, weight + scale
    return total / weight


def _eagle(params: Params, batch: Mapping[str, Any], shapes: Mapping[str, Any]) -> Any:
    import torch

    eps, features = shapes["eps"], batch["normed"]
    if shapes["noise"]:  # Rows hold one document each.
        width = shapes["noise"] * 512 / features.shape[1]
        features = features + width * (torch.rand_like(features) - 0.5)
    x = _linear(params, "fc", torch.cat([batch["embed"][_ahead(batch["tokens"], 1)], features], -1))
    q, key, value = _heads(params, "attn", x, batch["positions"], shapes, 0)
    x = x + _linear(params, "attn/o", _attention(q, [key], [value]))
    where = _ahead(_predicts(batch), 1)
    x = (x + _mlp(params, "mlp", _norm(params, "mlp_norm", x, eps)))[where]
    apart = torch.nn.functional.smooth_l1_loss(x, _ahead(batch["normed"], 1)[where], reduction="none").mean(-1)
    soft = -(_law(batch, 1, where).exp() * (x @ batch["head"]).log_softmax(-1)).sum(-1)
    return (shapes["feature_weight"] * apart + shapes["law_weight"] * soft).mean()


def _eagle3(params: Params, batch: Mapping[str, Any], shapes: Mapping[str, Any]) -> Any:
    import torch

    eps, predicts = shapes["eps"], _predicts(batch)
    taps = [batch[f"tap_{tap}"] for tap in shapes["taps"]]
    if "input_norm/weight" in params:
        taps = list(_norm(params, "input_norm", torch.cat(taps, -1), eps).chunk(len(taps), -1))
    if "fc_norm/0/weight" in params:
        taps = [_norm(params, f"fc_norm/{i}", tap, eps) for i, tap in enumerate(taps)]
    x = _linear(params, "fc", torch.cat(taps, -1))
    keys: list[Any] = []
    values: list[Any] = []
    total: Any = 0.0
    for k in range(shapes["steps"]):
        embeds = _norm(params, "embed_norm", batch["embed"][_ahead(batch["tokens"], k + 1)], eps)
        normed = _norm(params, "hidden_norm", x, eps)
        inner = torch.cat([embeds, normed], -1)
        q, key, value = _heads(params, "attn", inner, batch["positions"] + k, shapes, 0)
        keys.append(key)
        values.append(value)
        x = (normed if shapes["norm_before_residual"] else x) + _linear(params, "attn/o", _attention(q, keys, values))
        x = x + _mlp(params, "mlp", _norm(params, "mlp_norm", x, eps))
        hidden, where = _norm(params, "norm", x, eps), _ahead(predicts, k + 1)
        own = "lm_head/kernel" in params
        log_q = (_linear(params, "lm_head", hidden[where]) if own else hidden[where] @ batch["head"]).log_softmax(-1)
        total = total - shapes["decay"] ** k * (_law(batch, k + 1, where).exp() * log_q).sum()
        x = hidden if shapes["norm_output"] else x
    return total / _ahead(predicts, 1).sum()
