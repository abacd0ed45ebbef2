# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Why one token per pass is the enemy
#
# A pass over one token reads every weight of the model to do two operations with each. Hardware can do far more per
# byte than that, so plain decoding waits for memory, and a pass over several tokens costs hardly more than over one.
# That gap is what speculative decoding lives on: `t(gamma + 1) / t(1)` near 1.
#
# The first part is arithmetic on published figures of models and chips. The second reads a run of
# `python -m experiments.profile_pass`, when `PROFILE` names its profile.json, and holds the machine against the model.

# %%
import json
from pathlib import Path

from matplotlib import pyplot as plt

from specjax.analysis import Chip, PassCost, batch_break_even, batch_speedup, roofline_seconds

# The profile.json of a run on the machine in question; None leaves the second part out.
PROFILE = None

# %% [markdown]
# ## Bytes and operations of one token
#
# Weights are read once a pass; the cache of keys and values once a row. Parameters and cache shapes are those of the
# published configs, in 2 bytes a number, as if all of it fitted one chip; peak figures are the vendors', dense, in bfloat16.

# %%
GIGA, TERA = 1e9, 1e12
CHIPS = {
    "A100 80GB": Chip(bandwidth=2.04 * TERA, flops=312 * TERA),
    "H100 SXM": Chip(bandwidth=3.35 * TERA, flops=989 * TERA),
    "TPU v5e": Chip(bandwidth=0.82 * TERA, flops=197 * TERA),
}


def model(parameters: float, layers: int, kv_heads: int, head_dim: int, context: int) -> PassCost:
    """A dense decoder in bfloat16 with `context` tokens in the cache of each row."""
    kv_bytes = 2 * layers * kv_heads * head_dim * 2 * context
    return PassCost(weight_bytes=2 * parameters, flops_per_token=2 * parameters, kv_bytes_per_row=kv_bytes)


MODELS = {
    "SmolLM2-135M": model(0.135e9, 30, 3, 64, context=1024),
    "Llama-3.1-8B": model(8.03e9, 32, 8, 128, context=1024),
    "Llama-3.1-70B": model(70.6e9, 80, 8, 128, context=1024),
}

print(f"{'model':15} {'chip':10} {'bytes/token':>12} {'ops/byte':>9} {'chip ops/byte':>14} {'tokens/s at most':>17} {'arithmetic busy':>16}")
for name, cost in MODELS.items():
    for chip_name, chip in CHIPS.items():
        read = cost.weight_bytes + cost.kv_bytes_per_row
        seconds = roofline_seconds(cost, chip, batch=1)
        busy = cost.flops_per_token / chip.flops / seconds
        print(
            f"{name:15} {chip_name:10} {read / GIGA:10.2f}GB {cost.flops_per_token / read:9.2f} "
            f"{chip.flops / chip.bandwidth:14.0f} {1 / seconds:17.0f} {busy:16.1%}"
        )

# %% [markdown]
# About one operation a byte, where the chips offer 150 to 300: the arithmetic units idle more than 99 % of the time.
#
# ## t(T): a pass over T tokens
#
# By the same roofline a pass is free to widen until its arithmetic takes as long as its reading.

# %%
cost, widths = MODELS["Llama-3.1-8B"], [2**k for k in range(12)]
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for chip_name, chip in CHIPS.items():
    one = roofline_seconds(cost, chip, batch=1)
    axes.loglog(widths, [roofline_seconds(cost, chip, batch=1, tokens=t) / one for t in widths], "o-", label=chip_name)
axes.set(xlabel="T, tokens in the pass", ylabel="t(T) / t(1)", title="Llama-3.1-8B, batch 1, roofline")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## What a batch leaves of it
#
# A batch fills the same gap: its rows share one reading of the weights, so what is left for speculation shrinks, and
# rejected tokens start to cost what accepted ones do. Every row reads its own cache, though: 134 MB at these 1,024
# tokens. One-token passes of a large batch wait for that, and the gain falls without ending; with a short context
# (`kv_bytes_per_row` near 0) it ends once the wider pass is bound by arithmetic. A draft of 1/16 of the target's size,
# gamma 4:

# %%
chip = CHIPS["H100 SXM"]
draft = PassCost(cost.weight_bytes / 16, cost.flops_per_token / 16, cost.kv_bytes_per_row / 16)
batches = [1, 2, 4, 8, 16, 32, 64, 128, 256]
settings = {"draft_passes": 4, "target": cost, "draft": draft, "chip": chip}
for alpha in (0.6, 0.8, 0.9):
    speedups = [batch_speedup(alpha, 4, batch=batch, **settings) for batch in batches]
    limit = batch_break_even(alpha, 4, **settings)
    print(f"alpha {alpha}: " + "  ".join(f"{b}: {s:.2f}x" for b, s in zip(batches, speedups)) + f"   pays up to {limit}")

# %% [markdown]
# ## Measured
#
# A roofline is a bound: no launch time, no lost overlap. `bandwidth share` is the weights' bytes over the seconds of
# the pass, against what a plain read of memory reaches on the same machine.

# %%
if PROFILE is None:
    print("no profile: run python -m experiments.profile_pass and give the path of its profile.json as PROFILE")
else:
    found = json.loads(Path(PROFILE).read_text())
    machine = found["meta"]["machine"]
    print(f"{machine['processor']}, {machine['cores']} cores, {', '.join(machine['devices'])}")
    print(f"weights {found['weight_bytes'] / 1e6:.0f} MB, plain read {found['bandwidth_bytes_per_second'] / 1e9:.1f} GB/s")
    print(f"{'layout':8} {'T':>3} {'ms':>8} {'t(T)/t(1)':>10} {'bandwidth share':>16}")
    for row in found["tokens"]:
        print(
            f"{row['layout']:8} {row['tokens']:3} {1e3 * row['seconds']:8.2f} {row['ratio']:10.2f} "
            f"{row['bandwidth_share']:16.0%}"
        )
