"""What drafters hand over, what the target answers, what rules decide: the pytrees and the two protocols.

Dimensions: B rows, N draft nodes, P probes, D depth, T new tokens, L token buffer, V target vocabulary, Vd draft
vocabulary, M distinct laws. A *law* is a float32 array of log-probabilities.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from specjax.decoding.processors import History, process
from specjax.decoding.sampling import Keys, Sampling
from specjax.models import Decoder, KVCache, Tap

# How sibling nodes came to be: chosen by a rule (fixed), drawn independently from one law, drawn without
# replacement from one law, or some of each.
Kind = Literal["fixed", "iid", "without_replacement", "mixed"]


@flax.struct.dataclass
class Probes:
    """Extra tokens that ride the target pass and are never accepted (lookahead's window).

    Attributes:
        tokens: `[B, P]` int32.
        parents: `[B, P]` int32: -1 the root, 0..N-1 a node, N + j the probe j < own index.
    """

    tokens: jax.Array
    parents: jax.Array


@flax.struct.dataclass
class Resume:
    """Verification starts inside the target: layers below `layer` already ran on root and nodes.

    Their keys and values lie in the nodes' final cache slots.

    Attributes:
        hidden: `[B, N + 1, d]` inputs of layer `layer`, root first.
        layer: static.
    """

    hidden: jax.Array
    layer: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Widths:
    """The target's pass over a draft takes one of a few static widths (see `specjax.decoding.widths`).

    Attributes:
        choice: int32 scalar, index into `sizes`; nodes from that size on are invalid in every row.
        sizes: static; 0 is a plain pass.
    """

    choice: jax.Array
    sizes: tuple[int, ...] = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Draft:
    """A tree of N draft tokens under the root (the last committed token); a chain has parents -1, 0, 1, ...

    Attributes:
        tokens: `[B, N]` int32 in target ids; a node with another id is invalid.
        parents: `[B, N]` int32, -1 for children of the root, else the index of an earlier node.
        valid: `[B, N]` bool; an invalid node is never accepted, nor are its descendants. Whether a drawn node is valid
            must not depend on what was drawn for it, or behind it.
        law: `[B, N]` int32, the row of `laws` that the node was drawn from; -1 for a fixed choice. Siblings drawn
            without replacement keep theirs where they are invalid: those behind them were drawn with them taken out.
        laws: `[B, M, Vd]`, exactly the log-probabilities that were drawn from.
        vocab: `[Vd]` int32 target id of each draft id, or None where they agree.
        probes: see `Probes`.
        resume: see `Resume`.
        widths: None for a pass over all nodes, else see `Widths`.
        siblings: static; how drawn children of one node relate.
        is_chain: static; parents are -1, 0, 1, ... in every row.
    """

    tokens: jax.Array
    parents: jax.Array
    valid: jax.Array
    law: jax.Array
    laws: jax.Array
    vocab: jax.Array | None = None
    probes: Probes | None = None
    resume: Resume | None = None
    widths: Widths | None = None
    siblings: Literal["iid", "without_replacement"] = flax.struct.field(pytree_node=False, default="iid")
    is_chain: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.tokens.shape[1]

    def within(self, vocab: int) -> Draft:
        """The draft with nodes invalid whose token is no id of the target: its law is 0 there, or is not its."""
        known = (self.tokens >= 0) & (self.tokens < vocab)
        return dataclasses.replace(self, tokens=jnp.where(known, self.tokens, 0), valid=self.valid & known)


@flax.struct.dataclass
class Scores:
    """The target's answer to a draft.

    Attributes:
        logits: `[B, N + 1, V]` float32 at root and nodes, history processors applied, not yet warped: rules warp
            (temperature, top-k, top-p, min-p) only the rows that they visit.
        argmax: `[B, N + 1 + P]` int32, probes included.
        depths: `[B, N + 1]` int32, 0 for the root.
        taps: `{tap: [B, N + 1 + P, d]}`, what the drafter asked for.
    """

    logits: jax.Array
    argmax: jax.Array
    depths: jax.Array
    taps: dict[Tap, jax.Array]


@flax.struct.dataclass
class Verdict:
    """What a rule decided.

    Attributes:
        path: `[B, D]` int32 accepted nodes by depth, -1 behind the last.
        num_accepted: `[B]` int32.
        next_token: `[B]` int32, the token behind the accepted path (residual or bonus).
        overlap: `[B, D]` float32: sum of min(p, q) at each depth reached (p(x) for a fixed choice); NaN where the
            walk did not get to. Its mean is the acceptance rate alpha.
        fault: `[B]` int32: -1, or the first of root (0) and accepted nodes (node i is i + 1) whose logits are NaN or
            infinite.
    """

    path: jax.Array
    num_accepted: jax.Array
    next_token: jax.Array
    overlap: jax.Array
    fault: jax.Array


@flax.struct.dataclass
class Context:
    """What is committed when a step starts.

    Attributes:
        tokens: `[B, L]` int32; the root is `tokens[length - 1]`.
        length: `[B]` int32 committed tokens, the prompt included. At least 2 in every step.
        sampling: the rows' sampling parameters.
        history: the committed tokens counted, where some row has penalties.
    """

    tokens: jax.Array
    length: jax.Array
    sampling: Sampling
    history: History | None = None

    def last(self, count: int) -> jax.Array:
        """The last `count` committed tokens `[B, count]`; the root is the last of them."""
        slots = self.length[:, None] - count + jax.numpy.arange(count)
        return jax.numpy.take_along_axis(self.tokens, slots, axis=1)

    def process(
        self,
        logits_bmv: jax.Array,
        drafted_ba: jax.Array | None = None,
        on_path_bma: jax.Array | None = None,
        vocab: jax.Array | None = None,
    ) -> jax.Array:
        """A drafter's logits as the target's will be processed (see `specjax.decoding.processors.process`).

        Warp the result with `log_law`. A draft law without it is still verified exactly, but meets the target's less
        often.

        Args:
            logits_bmv: at M places of each row.
            drafted_ba: int32 tokens drafted so far, in the ids of `logits`; None for none.
            on_path_bma: bool, which of them are in front of each place.
            vocab: `[Vd]` target ids of a reduced draft vocabulary.
        """
        return process(logits_bmv, self.sampling, self.history, drafted_ba, on_path_bma, vocab)


class Drafter(Protocol):
    """A drafting method. Implementations are frozen, hashable dataclasses: statics of the compiled step.

    `params` are trained floats; `tables` are arrays that are never differentiated (d2t maps, trees, stores); `state`
    is a pytree whose leaves have B first. All methods but `init_params` run inside the trace.
    """

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The target activations this drafter reads in `extend` and `commit`."""
        ...

    @property
    def num_nodes(self) -> int:
        """N; 0 is plain decoding."""
        ...

    @property
    def num_probes(self) -> int:
        """P."""
        ...

    @property
    def depth(self) -> int:
        """D, the longest path; at most N."""
        ...

    def kind(self, sampling: Sampling) -> Kind:
        """How sibling nodes are made under these sampling statics."""
        ...

    def init_params(self, key: jax.Array, target: Decoder) -> tuple[Any, Any]:
        """Fresh `(params, tables)`."""
        ...

    def init_state(self, params: Any, tables: Any, target: Decoder, batch: int, capacity: int) -> Any:
        """An empty state for `batch` rows of at most `capacity` positions."""
        ...

    def extend(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: Any,
        tokens: jax.Array,
        positions: jax.Array,
        taps: dict[Tap, jax.Array],
        valid: jax.Array,
    ) -> Any:
        """Takes in consecutive tokens `[B, T]` with their positions, taps and validity: every prefill chunk."""
        ...

    def propose(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        cache: KVCache,
        state: Any,
        context: Context,
        keys: Keys,
    ) -> tuple[Draft, Any, KVCache]:
        """One draft. May use the target cache's scratch slots (from `cache.length` on)."""
        ...

    def commit(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: Any,
        context: Context,
        draft: Draft,
        scores: Scores,
        verdict: Verdict,
    ) -> Any:
        """Takes in the verdict; `context` is still that of the step's start."""
        ...


def draft_passes(drafter: Any) -> int:
    """Passes of the draft in one step, what draft costs are told by: the drafter's own `draft_passes`, else one.

    None where nothing is drafted.
    """
    return getattr(drafter, "draft_passes", 1) if drafter.num_nodes else 0


class Stateless:
    """The four methods of a `Drafter` that trains nothing and keeps nothing between steps, to inherit from."""

    def init_params(self, key: jax.Array, target: Decoder) -> tuple[Any, Any]:
        """No parameters, no tables."""
        del key, target
        return {}, {}

    def init_state(self, params: Any, tables: Any, target: Decoder, batch: int, capacity: int) -> Any:
        """No state."""
        del params, tables, target, batch, capacity
        return {}

    def extend(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: Any,
        tokens: jax.Array,
        positions: jax.Array,
        taps: dict[Tap, jax.Array],
        valid: jax.Array,
    ) -> Any:
        """Nothing to take in."""
        del params, tables, target, tokens, positions, taps, valid
        return state

    def commit(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: Any,
        context: Context,
        draft: Draft,
        scores: Scores,
        verdict: Verdict,
    ) -> Any:
        """Nothing to take in."""
        del params, tables, target, context, draft, scores, verdict
        return state


class Rule(Protocol):
    """A verification rule. Frozen and hashable."""

    @property
    def exact_for(self) -> frozenset[Kind]:
        """The kinds of draft for which the output law is exactly the target's; empty for a lossy rule."""
        ...

    def verify(self, draft: Draft, scores: Scores, sampling: Sampling, keys: Keys) -> Verdict:
        """Accepts a path and picks the token behind it."""
        ...
