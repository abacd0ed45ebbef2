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
# # DistillSpec: which divergence, whose text
#
# Zhou et al. 2023 (arXiv:2310.08461): a draft is distilled from its target, on one of several divergences and texts. It reports 10 to
# 45 % over speculative decoding with a draft that was not distilled, and no one best divergence: it depends on task and decoding.
# What is rejected is the total variation itself: alpha = 1 - TV(p, q), so TV is the objective, and the others are stand-ins for it.
#
# First a table of laws and a student too small for them, fitted under each divergence of the library; then pairs of small trainings
# on SmolLM2-135M-Instruct. Half a minute; `RERUN = True` trains again what this and the notebooks of EAGLE and EAGLE-3 read (under an
# hour on two idle cores, by estimate).

# %%
import functools
import sys

sys.path.insert(0, "..")  # the repository, whose programs are not installed
import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.paper_tables import judge, paired, study
from specjax.training.objectives.distill import DIVERGENCES, divergence_of, overlap

RERUN = False

# %% [markdown]
# ## A student that cannot be the target
#
# 64 contexts over 40 tokens; the student's logits are linear in a few features of the context, random ones. With 64 features it
# could be the target, with 2 it is far from it. Adam, 600 steps, in double precision; alpha is the mean of sum min(p, q) over the
# contexts and three tables; before training the student's law is uniform.

# %%
CONTEXTS, TOKENS, STEPS = 64, 40, 600


def table(seed: int, features: int):
    """Log-laws of a target, and what a student reads."""
    rng = np.random.default_rng(seed)
    logits = 2.5 * rng.normal(size=(CONTEXTS, TOKENS))
    return jax.nn.log_softmax(jnp.asarray(logits)), jnp.asarray(rng.normal(size=(CONTEXTS, features)) / features**0.5)


def fitted(name: str, log_p, read):
    """Alpha of a student that was fitted under a divergence."""
    divergence, optimizer = divergence_of(name), optax.adam(0.05)

    def law(weights):
        return jax.nn.log_softmax(read @ weights)

    def step(carry, _):
        weights, state = carry
        gradient = jax.grad(lambda w: divergence(log_p, law(w)).mean())(weights)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(weights, updates), state), None

    start = jnp.zeros((read.shape[1], TOKENS))
    (weights, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), length=STEPS)
    return overlap(log_p, law(weights)).mean()


found = {}
with jax.enable_x64(True):
    print(f"{'features':>8} | {'before':>6} | " + " | ".join(f"{name:>10}" for name in DIVERGENCES))
    for features in (2, 8, 32):
        laws, reads = (jnp.stack(parts) for parts in zip(*(table(seed, features) for seed in range(3))))
        before = overlap(laws, jnp.full_like(laws, -np.log(TOKENS))).mean()
        alphas = {name: jax.vmap(functools.partial(fitted, name))(laws, reads) for name in DIVERGENCES}
        found[features] = {name: float(alpha.mean()) for name, alpha in alphas.items()}
        print(f"{features:8} | {before:6.2f} | " + " | ".join(f"{alpha:10.2f}" for alpha in found[features].values()))
others = {features: max(a for name, a in alphas.items() if name != "forward_kl") for features, alphas in found.items()}
assert all(best > found[features]["forward_kl"] for features, best in others.items())

# %% [markdown]
# Forward KL makes a small student cover all that the target may say, and its overlap suffers: in no row is it the best, and with 8
# features it accepts a third less than Jensen-Shannon. Total variation is what is asked for, and yet not always what is best to
# descend: where the student can come close, Jensen-Shannon leads it.
#
# ## Paper | ours | verdict
#
# `alpha` at the next token, teacher forced, on held-out answers drawn at temperature 1; the interval is of the difference, from a
# paired bootstrap over held-out rows. The paper does not say that a divergence beats forward KL everywhere: these pairs ask where
# it does here.

# %%
rows = study("ablations", rerun=RERUN)
judge(
    [
        ("total variation beats forward KL", "the best divergence depends on task and decoding", paired("tvd")),
        ("reverse KL beats forward KL", "as above", paired("reverse_kl")),
        ("Jensen-Shannon beats forward KL", "as above", paired("jsd")),
        ("-log alpha beats forward KL", "(not in the paper)", paired("lk")),
        ("the target's own text beats people's", "text written by a model over a fixed set", paired("text")),
    ],
    rows,
)

# %% [markdown]
# Scale is the caveat: drafts of two layers, 31k positions. From a start far from the target the gradient of the total variation is
# small where it matters (a token with q above p yields the same whatever its p), so short trainings speak for the divergences that
# start fast.
