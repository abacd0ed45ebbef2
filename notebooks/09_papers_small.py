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
# # Papers at small scale: what the runs of `configs/papers` say
#
# Each paper's question asked on a model of 135M parameters (Gloeckle's on one of 5.6M), on two cores. A run is read where its
# summary is committed as `results/<paper>.json`; they hold counts and times, no tokens. The claims that are checked are
# about order and direction: speedups belong to a machine.
#
#     python -m experiments.small [<paper> ...] --minutes=170
#
# `RERUN = True` makes all of them again (about three hours on two cores; started again it goes on where it was).

# %%
import sys

sys.path.insert(0, "..")  # the repository, whose programs are not installed
from experiments.paper_tables import MISSING, NOISE, compare, judge, pick, study, verdict

RERUN = False

# %% [markdown]
# ## Claims

# %%


def expected(rows):
    """Measured over predicted speedup of every drafting row."""
    ratios = [row["speedup"] / row["speedup_predicted"] for row in pick(rows) if row["num_nodes"]]
    inside = 0.69 <= min(ratios) and max(ratios) <= 1.3
    return f"{min(ratios):.2f} to {max(ratios):.2f}", "agrees" if inside else "refutes, at this scale"


def heads(rows):
    """Tokens a pass by heads used, greedy."""
    used = sorted(pick(rows, method="mtp", temperature=0.0), key=lambda row: row["num_nodes"])
    taus = [row["tau"] for row in used]
    return ", ".join(f"{row['num_nodes'] + 1} heads {row['tau']:.2f}" for row in used), verdict(
        [b / a for a, b in zip(taus, taus[1:])]
    )


def code_and_prose(rows):
    """Whether code accepts more than prose, with the most heads, greedy."""
    most = max((row["num_nodes"] for row in pick(rows, method="mtp")), default=0)
    code, prose = (pick(rows, category=c, method="mtp", num_nodes=most, temperature=0.0) for c in ("code", "prose"))
    if not code or not prose:
        return "no such categories", MISSING
    return f"code {code[0]['tau']:.2f}, prose {prose[0]['tau']:.2f}", verdict([code[0]["tau"] / prose[0]["tau"]])


def exits(rows):
    """Best speed of the target's own layers as a draft."""
    best = max(pick(rows, method="early_exit"), key=lambda row: row["speedup"])
    found = "agrees" if best["speedup"] > 1 + NOISE else "refutes for a target that was not trained to exit early"
    return f"best {best['label']}: {best['speedup']:.2f}x, alpha {best['alpha']:.2f}", found


def lookahead(rows):
    """Best speed over windows."""
    best = max(pick(rows, method="lookahead"), key=lambda row: row["speedup"])
    return f"best {best['label']}: {best['speedup']:.2f}x, tau {best['tau']:.2f}", verdict([best["speedup"]])


CLAIMS = {
    "leviathan": [("measured over expected speedup", "0.69 to 1.3 (table 4)", expected)],
    "block_verification": [
        ("block accepts more than token by token", "+5 to 8 % wall clock", compare("token", "block")),
        ("and is faster for it", "+5 to 8 %", compare("token", "block", "speedup")),
    ],
    "medusa": [
        ("a tree accepts more than a chain", "figure 4", compare("chain", "tree")),
        (
            "typical acceptance accepts more than exact (T = 0.7; it is lossy)",
            "table 5",
            compare("tree", "typical", above=0.0),
        ),
    ],
    "hydra": [("sequential heads accept more than independent ones", "1.27x the speed", compare("medusa", "hydra"))],
    "eagle": [
        (
            "a dynamic tree accepts more than a chain",
            "tau 3.94 -> 4.98 (7B, EAGLE's tree to EAGLE-2's)",
            compare("chain", "tree"),
        )
    ],
    "lookahead": [("faster without a draft model", "1.5x to 2.3x (A100)", lookahead)],
    "layerskip": [("the first layers draft for all", "1.82x on code", exits)],
    "gloeckle": [
        ("more heads, more tokens a pass", "1.94, 2.78, 3.50 on code (2, 3, 4 heads)", heads),
        ("more on code than on prose", "3.50 and 3.12 (4 heads)", code_and_prose),
    ],
}
for paper, claims in CLAIMS.items():
    rows = study(paper, rerun=RERUN)
    if rows is not None:
        judge(claims, rows)
    print()

# %% [markdown]
# The caveat is the same throughout: a model this small is cheap to run and hard to draft for, its draft is not much cheaper than
# itself, and on a processor a pass over several tokens is dearer than over one from the start. Orders of acceptance carry over;
# speedups do not.
