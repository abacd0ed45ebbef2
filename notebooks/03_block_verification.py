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
# # Block verification, in exact fractions
#
# Sun et al. 2024, *Block verification accelerates speculative decoding* (arXiv:2403.10444): deciding on a whole block keeps at
# least as many tokens as deciding token by token, at the same output law. Their example has two tokens,
# p = (1/3, 2/3) and q = (2/3, 1/3) at every position.
#
# Nothing is sampled: drafts are enumerated and accept events integrated as fractions. It takes seconds.

# %%
from fractions import Fraction as F

import numpy as np

from specjax.analysis import (
    REFERENCE_RULES,
    block_expected_accepted,
    block_gain,
    chain_parents,
    enumerate_output_law,
    enumerate_step,
    ideal_expected_accepted,
    sampled_draws,
    target_law,
    token_expected_accepted,
    total_variation,
)

P, Q = (F(1, 3), F(2, 3)), (F(2, 3), F(1, 3))
# gamma: expected accepted tokens, block and token by token, as the paper has them.
PAPER = {1: (F(2, 3), F(2, 3)), 2: (F(11, 9), F(10, 9)), 3: (F(5, 3), F(38, 27)), 4: (F(166, 81), F(130, 81))}


def target(context: tuple[int, ...]) -> tuple[F, ...]:
    return P


def draft(context: tuple[int, ...]) -> tuple[F, ...]:
    return Q


# %% [markdown]
# ## Expected accepted tokens: paper | formula | enumeration of the rule | agrees

# %%
print(f"{'gamma':>5} | {'paper block':>11} {'token':>7} | {'formula':>8} {'token':>7} | {'rule':>8} {'token':>7} | {'ideal':>7} | agrees")
for gamma, (block, token) in PAPER.items():
    draws = sampled_draws(draft, chain_parents(gamma))
    formula = block_expected_accepted(P, Q, gamma), token_expected_accepted(P, Q, gamma)
    rule = tuple(
        enumerate_step(REFERENCE_RULES[name], target, draws).expected_accepted for name in ("block", "speculative")
    )
    agrees = formula == rule == (block, token)
    print(
        f"{gamma:5} | {block!s:>11} {token!s:>7} | {formula[0]!s:>8} {formula[1]!s:>7} | {rule[0]!s:>8} {rule[1]!s:>7} | "
        f"{ideal_expected_accepted(P, Q, gamma)!s:>7} | {'yes' if agrees else 'NO'}"
    )
    assert agrees

# %% [markdown]
# ## The output law is the target's
#
# The joint law of the first two tokens with gamma = 2, over as many steps as it takes: 1/9, 2/9, 2/9, 4/9 exactly. The same
# enumeration shows what happens when the block rule stops at the first failure, as token verification does.

# %%
draws = sampled_draws(draft, chain_parents(2))
law = enumerate_output_law(REFERENCE_RULES["block"], target, draws, horizon=2)
print("block:", {tokens: str(mass) for tokens, mass in law.items()})
print("total variation to the target's law:", total_variation(law, target_law(target, 2)))
assert law == target_law(target, 2)

# %% [markdown]
# ## How much it gains, over random laws
#
# p and q agree to some degree: q is a mixture of p and a law of its own. Gain in tokens a pass, bonus included, in per cent.
# The paper measures 5 to 8 % of wall clock on its models at gamma 8.


# %%
def random_law(rng: np.random.Generator, size: int = 3) -> tuple[F, ...]:
    """A law in 24ths."""
    parts = rng.multinomial(24 - size, np.full(size, 1 / size)) + 1
    return tuple(F(int(x), 24) for x in parts)


rng = np.random.default_rng(0)
pairs = [(random_law(rng), random_law(rng)) for _ in range(24)]
print(f"{'likeness':>8} {'alpha':>6} " + " ".join(f"gamma={g}" for g in (1, 2, 4, 6)))
smallest = []
for share in (F(1, 4), F(1, 2), F(3, 4)):
    laws = [(p, tuple(share * a + (1 - share) * b for a, b in zip(p, other))) for p, other in pairs]
    rates = [float(sum(map(min, p, q))) for p, q in laws]
    gains = {g: [float(block_gain(p, q, g)) - 1 for p, q in laws] for g in (1, 2, 4, 6)}
    smallest += [min(values) for values in gains.values()]
    print(f"{float(share):8.2f} {np.mean(rates):6.2f} " + " ".join(f"{100 * np.mean(v):6.1f}%" for v in gains.values()))
print(f"smallest gain of any pair: {100 * min(smallest):.1f}%")
assert min(smallest) >= 0

# %% [markdown]
# ## Measured, where a run is committed
#
# `python -m experiments.small block_verification` puts it at `results/block_verification.json`.

# %%
import json
from pathlib import Path

summary = Path("results/block_verification.json")
if summary.exists():
    rows = [r for r in json.loads(summary.read_text())["rows"] if r["category"] == "all" and r["num_nodes"]]
    print(f"{'row':12} {'T':>3} {'gamma':>5} {'tau':>5} {'speedup':>8} {'predicted':>9}")
    for row in rows:
        print(
            f"{row['label']:12} {row['temperature']:3g} {row['num_nodes']:5} {row['tau']:5.2f} {row['speedup']:8.2f} "
            f"{row['speedup_predicted'] or float('nan'):9.2f}"
        )
    by = {(r["rule"], r["num_nodes"]): r["tau"] for r in rows}
    for gamma in sorted({r["num_nodes"] for r in rows}):
        token, block = by.get(("speculative", gamma)), by.get(("block", gamma))
        if token and block:
            print(f"gamma {gamma}: block over token by token, tokens a pass: {100 * (block / token - 1):+.1f}%")
else:
    print("no run is committed: undecided on real laws")

# %% [markdown]
# | claim | paper | ours | verdict |
# |---|---|---|---|
# | the four expected lengths | fractions above | the same fractions, by formula and by rule | agrees |
# | lossless | theorem | exact law | agrees |
# | never accepts less | theorem 2 | no pair loses | agrees |
# | gain grows with gamma; 5 to 8 % of wall clock | measured on large models | grows: about 1 % at gamma 2, 4 to 10 % at gamma 6 | agrees in sign and order of size; real laws are not iid, so no more can be said |
