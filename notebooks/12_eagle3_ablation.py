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
# # EAGLE-3's ablation: training on its own outputs, and features of three layers
#
# Li et al. 2025 (arXiv:2503.01840, table 2), Llama-3.1-8B-Instruct, temperature 0: from EAGLE-2 on, the feature loss is dropped and
# the head trained on its own outputs ("training-time test"), then features of three layers are fused in the place of the last.
#
# Published figures beside pairs of small trainings on SmolLM2-135M-Instruct that differ in nothing else. Seconds; `RERUN = True`
# trains again what this and the notebooks of EAGLE and DistillSpec read (under an hour on two idle cores, by estimate).

# %%
import sys

sys.path.insert(0, "..")  # the repository, whose programs are not installed
from experiments.paper_tables import judge, paired, study

RERUN = False
# Speedup and tau on MT-bench and GSM8K.
TABLE_2 = {
    "EAGLE-2": ((3.16, 4.05), (3.39, 4.24)),
    "no feature loss, trained on its own outputs": ((3.82, 5.37), (3.77, 5.22)),
    "and features of three layers": ((4.40, 6.13), (4.48, 6.23)),
}

# %% [markdown]
# ## Published

# %%
before, gains = None, []
for name, sets in TABLE_2.items():
    said = "; ".join(f"{speedup:.2f}x, tau {tau:.2f}" for speedup, tau in sets)
    if before is not None:
        gains.append([after[1] - earlier[1] for earlier, after in zip(before, sets, strict=True)])
        said += f"   tau {', '.join(f'{gain:+.2f}' for gain in gains[-1])}"
    print(f"{name:44} {said}")
    before = sets
shares = [first / (first + second) for first, second in zip(*gains, strict=True)]
print(f"share of the gain in tau that is owed to the first step: MT-bench {shares[0]:.0%}, GSM8K {shares[1]:.0%}")

# %% [markdown]
# Most of the gain in tau on MT-bench, and half of it on GSM8K, is owed to how the head is trained; the rest to what it reads.
#
# ## Paper | ours | verdict
#
# `accepted` are the tokens that a greedy chain of three keeps, teacher forced, on held-out greedy answers; both heads of a pair are
# measured over three steps. The interval is of the difference, from a paired bootstrap over held-out rows.

# %%
rows = study("ablations", rerun=RERUN)
judge(
    [
        ("training on three steps of its own outputs beats one step", "tau 4.05 -> 5.37", paired("steps")),
        ("features of three layers beat those of the highest", "tau 5.37 -> 6.13", paired("fusion")),
    ],
    rows,
)

# %% [markdown]
# Scale is the caveat: 31k positions of training against half a million conversations, three steps against seven, a target of 30
# narrow layers. The paper's own curves say that the gain of EAGLE-3 grows with data (figure 1); a small run may find it undecided.
# How acceptance falls with the number of own features is in notebook 10.
