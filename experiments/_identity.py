"""What a run's figures are of, beyond names: hashes of the target, of its template and of the drafters' arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import jax

from specjax.evaluation.contenders import Contender, LoopContender
from specjax.evaluation.conversations import TEMPLATES, template_text
from specjax.evaluation.journal import fingerprint
from specjax.models import Target
from specjax.training.identity import target_identity


def identity(target: Target, template: str, contenders: Sequence[Contender] = ()) -> dict[str, Any]:
    """For a results file's meta: `target_identity`, and `drafters`, a hash by label.

    Of the target's weights those of norms and biases are hashed, which tell checkpoints apart and are small wherever
    the rest of them lies.
    """
    of_target = target_identity(target)
    if template not in TEMPLATES:
        of_target["chat_template"] = hashlib.sha256(template_text(template).encode()).hexdigest()[:16]
    of_target["weights"] = fingerprint([x for x in jax.tree.leaves(target.params) if x.ndim <= 1])
    drafters = {c.info.label: fingerprint(c.weights.drafter) for c in contenders if isinstance(c, LoopContender)}
    return {"target_identity": of_target, "drafters": drafters}
