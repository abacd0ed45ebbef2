"""Ensembles: drafters composed of member drafters."""

from specjax.drafting.ensemble.members import Members, Stack, assemble
from specjax.drafting.ensemble.mixture import EnsembleMixture
from specjax.drafting.ensemble.proxy import EnsembleProxy
from specjax.drafting.ensemble.union import EnsembleUnion
from specjax.drafting.ensemble.vote import EnsembleVote, acceptance_by_share

__all__ = [
    "EnsembleMixture",
    "EnsembleProxy",
    "EnsembleUnion",
    "EnsembleVote",
    "Members",
    "Stack",
    "acceptance_by_share",
    "assemble",
]
