"""The members of an ensemble: run together, each with its own parameters, state and randomness.

Parameters, tables and states are tuples, one entry a member, or one for several draft models of one config whose
arrays are stacked: those run as one, by `vmap`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoding import Context, Draft, Drafter, Keys, Kind, Sampling, Scores, Verdict, draft_passes
from specjax.drafting.adaptive import Adaptive
from specjax.drafting.any_context import any_context
from specjax.drafting.draft_model import DraftModel
from specjax.drafting.jacobi import Jacobi
from specjax.drafting.kangaroo import Kangaroo
from specjax.drafting.other_tokenizer import OtherTokenizer
from specjax.models import Decoder, KVCache, Tap

# Folded into a request's key for its members: no position reaches so far, so no key is used twice.
_OWN = 1 << 31


@dataclasses.dataclass(frozen=True)
class Stack:
    """Draft models of one config. Parameters and tables have the member first, states `[B, member, ...]`.

    Attributes:
        drafter: what each of them is.
        count: how many.
    """

    drafter: DraftModel
    count: int


@dataclasses.dataclass(frozen=True)
class Members:
    """Two or more drafters of the same target.

    Attributes:
        entries: drafters and stacks of them.
    """

    entries: tuple[Drafter | Stack, ...]

    def __post_init__(self) -> None:
        if self.count < 2:
            raise ValueError(f"an ensemble of {self.count}; expected at least 2 members")
        for drafter in self.drafters:
            if not drafter.num_nodes:
                raise ValueError(f"member {_name(drafter)} drafts nothing (num_nodes=0); leave it out")
            if drafter.num_probes:
                raise ValueError(
                    f"member {_name(drafter)} sends {drafter.num_probes} probes with the target's pass, which belong "
                    "to a draft of its own; a member must draft without probes"
                )
            _check_other_paths(drafter)

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """Every member, in order."""
        return tuple(d for entry in self.entries for d in [_one(entry)] * _count(entry))

    @property
    def count(self) -> int:
        """J, how many members there are."""
        return sum(_count(entry) for entry in self.entries)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """What any member reads of the target."""
        return tuple(dict.fromkeys(tap for drafter in self.drafters for tap in drafter.taps))

    @property
    def draft_passes(self) -> int:
        """All members' passes in one draft of each; those of a stack count one by one."""
        return sum(draft_passes(drafter) for drafter in self.drafters)

    def kinds(self, sampling: Sampling) -> set[Kind]:
        """The kinds of the members' drafts."""
        return {drafter.kind(sampling) for drafter in self.drafters}

    def resized(self, num_nodes: int) -> Members:
        """The same members, each to draft `num_nodes` tokens."""

        def resize(entry: Drafter | Stack) -> Drafter | Stack:
            if isinstance(entry, Stack):
                return dataclasses.replace(entry, drafter=dataclasses.replace(entry.drafter, num_nodes=num_nodes))
            try:
                return dataclasses.replace(entry, num_nodes=num_nodes)  # type: ignore[type-var]
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"member {_name(entry)} does not draft chains of any length, as this ensemble asks: {error}"
                ) from error

        return dataclasses.replace(self, entries=tuple(resize(entry) for entry in self.entries))

    def reading(self, window: int) -> Members:
        """The same members; draft models feed so many committed tokens first, over those of theirs that were rejected.

        Args:
            window: one more than the longest path that another member may have drafted.
        """

        def widen(entry: Drafter | Stack) -> Drafter | Stack:
            drafter = _one(entry)
            if not isinstance(drafter, DraftModel):
                return entry
            wider = dataclasses.replace(drafter, window=max(window, drafter.window))
            return Stack(wider, entry.count) if isinstance(entry, Stack) else wider

        return dataclasses.replace(self, entries=tuple(widen(entry) for entry in self.entries))

    def check_depth(self, depth: int) -> None:
        """Refuses members that could not take in a path as long as the ensemble's.

        Raises:
            ValueError: a member that reads the target's activations, or spells the text anew, drafts less deep; it
                holds room for its own depth.
        """
        for drafter in self.drafters:
            if drafter.taps and drafter.depth != depth:
                raise ValueError(
                    f"member {_name(drafter)} reads the target's activations along at most {drafter.depth} tokens, but "
                    f"the ensemble drafts {depth} deep; give the members one depth"
                )
            if isinstance(drafter, OtherTokenizer) and drafter.depth != depth:
                raise ValueError(
                    f"member {_name(drafter)} spells at most {drafter.depth} accepted tokens a step, but the ensemble "
                    f"drafts {depth} deep; give the members one depth"
                )

    def check_lockstep(self) -> None:
        """Refuses members that cannot continue from a token that is not committed.

        Raises:
            ValueError: a member reads the target's activations, which exist for committed tokens only, or keeps a
                state that it could not take back.
        """
        for drafter in self.drafters:
            if drafter.taps:
                raise ValueError(
                    f"member {_name(drafter)} reads the target's activations {drafter.taps}: it cannot continue from a "
                    "token that the ensemble chose; use ensemble_union or ensemble_proxy"
                )
            if not isinstance(drafter, DraftModel) and not any_context(drafter):
                raise ValueError(
                    f"member {_name(drafter)} keeps a state that follows the committed text: it cannot continue from a "
                    "token that the ensemble chose. Use ensemble_union or ensemble_proxy; a drafter of your own whose "
                    "state allows it inherits Stateless or declares any_context = True"
                )

    def init_params(self, key: jax.Array, target: Decoder) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Fresh `(params, tables)`, each a tuple."""
        params, tables = [], []
        for index, entry in enumerate(self.entries):
            keys = jax.random.split(jax.random.fold_in(key, index), _count(entry))
            made = [_one(entry).init_params(k, target) for k in keys]
            both = jax.tree.map(lambda *x: jnp.stack(x), *made) if isinstance(entry, Stack) else made[0]
            params.append(both[0])
            tables.append(both[1])
        return tuple(params), tuple(tables)

    def init_state(self, params: Any, tables: Any, target: Decoder, batch: int, capacity: int) -> tuple[Any, ...]:
        """Empty states.

        Raises:
            ValueError: a member for another vocabulary than the target's.
        """
        self._check_vocabularies(tables, target)

        def one(entry: Drafter | Stack, params: Any, tables: Any) -> Any:
            if not isinstance(entry, Stack):
                return entry.init_state(params, tables, target, batch, capacity)
            state = jax.eval_shape(lambda: entry.drafter.init_state(params, tables, target, batch, capacity))
            return jax.tree.map(lambda x: jnp.zeros((x.shape[0], entry.count, *x.shape[1:]), x.dtype), state)

        return tuple(one(*each) for each in zip(self.entries, params, tables, strict=True))

    def _check_vocabularies(self, tables: Any, target: Decoder) -> None:
        """Refuses a member that writes other tokens than the target, without a table that says which."""
        for entry, own in zip(self.entries, tables, strict=True):
            drafter = _one(entry)
            size = getattr(getattr(drafter, "config", None), "head_size", None)
            mapped = isinstance(drafter, OtherTokenizer) or "vocab" in own
            if size is not None and not mapped and size != target.config.head_size:
                raise ValueError(
                    f"member {_name(drafter)} writes {size} tokens, the target has {target.config.head_size}: an "
                    "ensemble drafts in one vocabulary. Give the member a table `vocab`, or use OtherTokenizer"
                )

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
    ) -> tuple[Any, ...]:
        """See `Drafter.extend`, for every member."""

        def one(entry: Drafter | Stack, params: Any, tables: Any, state: Any) -> Any:
            def extend(params: Any, tables: Any, state: Any) -> Any:
                return _one(entry).extend(params, tables, target, state, tokens, positions, taps, valid)

            if isinstance(entry, Stack):
                return jax.vmap(extend, in_axes=(0, 0, 1), out_axes=1)(params, tables, state)
            return extend(params, tables, state)

        return tuple(one(*each) for each in zip(self.entries, params, tables, state, strict=True))

    def propose(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        cache: KVCache,
        state: Any,
        context: Context,
        keys: Keys,
    ) -> tuple[list[Draft], tuple[Any, ...], KVCache]:
        """One draft of every member, laws in target ids, without what only a draft of one's own may carry (`resume`).

        Each member draws with keys of its own: the exact rules take the drafts of different members as independent.
        """
        drafts: list[Draft] = []
        states = []
        for entry, own_params, own_tables, own in zip(self.entries, params, tables, state, strict=True):
            mine = [fold(keys, len(drafts) + j) for j in range(_count(entry))]
            if isinstance(entry, Stack):
                found, own = _propose_stacked(entry, own_params, own_tables, target, cache, own, context, mine)
            else:
                draft, own, cache = entry.propose(own_params, own_tables, target, cache, own, context, mine[0])
                found = [draft]
            drafts += [_in_target_ids(draft, target.config.head_size) for draft in found]
            states.append(own)
        return drafts, tuple(states), cache

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
    ) -> tuple[Any, ...]:
        """Every member takes in the verdict on the ensemble's draft."""

        def one(entry: Drafter | Stack, params: Any, tables: Any, state: Any) -> Any:
            if isinstance(entry, Stack):
                return state  # A draft model has nothing to take in: it feeds its window in the next step.
            return entry.commit(params, tables, target, state, context, draft, scores, verdict)

        return tuple(one(*each) for each in zip(self.entries, params, tables, state, strict=True))


def assemble(
    drafters: Sequence[Drafter], params: Sequence[Any], tables: Sequence[Any], *, stacked: bool = True
) -> tuple[Members, tuple[Any, ...], tuple[Any, ...]]:
    """Members with their arrays; neighbours that are draft models of one config are stacked.

    Args:
        drafters: in order.
        params: of each.
        tables: of each.
        stacked: False keeps all apart; packed weights (see `specjax.models.linear`) do not stack.
    """
    entries: list[Drafter | Stack] = []
    all_params, all_tables = [], []
    for drafter, part in _runs(drafters, params, tables, stacked):
        if len(part) == 1:
            entries.append(drafter)
            own = part[0]
        else:
            assert isinstance(drafter, DraftModel)
            entries.append(Stack(drafter, len(part)))
            own = jax.tree.map(lambda *x: jnp.stack(x), *part)
        all_params.append(own[0])
        all_tables.append(own[1])
    return Members(tuple(entries)), tuple(all_params), tuple(all_tables)


def _runs(
    drafters: Sequence[Drafter], params: Sequence[Any], tables: Sequence[Any], stacked: bool
) -> Iterator[tuple[Drafter, list[tuple[Any, Any]]]]:
    """Neighbours that can be stacked, others one by one."""

    def same(index: int) -> Any:
        if not stacked or not isinstance(drafters[index], DraftModel):
            return index
        arrays = (params[index], tables[index])
        shapes = tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(arrays))
        return drafters[index], jax.tree.structure(arrays), shapes

    for _, run in itertools.groupby(range(len(drafters)), key=same):
        indices = list(run)
        yield drafters[indices[0]], [(params[i], tables[i]) for i in indices]


def per_member(
    name: str, values: Sequence[float] | None, count: int, default: float, *, most: float | None = None
) -> jax.Array:
    """`[J]` float32: one number a member, checked.

    Args:
        name: of the numbers, for errors.
        values: one a member; None for the default.
        count: of members.
        default: where there are no values.
        most: what none of them may exceed: 1 where they are shares.

    Raises:
        ValueError: not one a member, a negative, infinite or too large one, or all of them zero.
    """
    numbers = [default] * count if values is None else [float(v) for v in values]
    if len(numbers) != count:
        raise ValueError(f"{name}={tuple(numbers)} for {count} members; give one number a member")
    if not all(0 <= v < float("inf") for v in numbers) or not any(numbers):
        raise ValueError(f"{name}={tuple(numbers)}; expected numbers >= 0, at least one of them above 0")
    if most is not None and max(numbers) > most:
        raise ValueError(f"{name}={tuple(numbers)}; expected shares: numbers of at most {most:g}")
    return jnp.asarray(numbers, jnp.float32)


def fold(keys: Keys, index: int) -> Keys:
    """Keys of part `index` of a drafter, apart from its own and those of every other part."""

    def one(data: jax.Array) -> jax.Array:
        return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(data), _OWN + index))

    return dataclasses.replace(keys, request=jax.vmap(one)(keys.request))


def _check_other_paths(drafter: Drafter) -> None:
    """Refuses what would keep its own rejected tokens where another member's were accepted."""
    why = None
    if isinstance(drafter, Kangaroo):
        why = "whose adapter's cache holds its own draft, whichever member's tokens are accepted"
    elif isinstance(drafter, Jacobi):
        why = "whose next guesses are what the target says at the places of its own block"
    elif isinstance(drafter, Adaptive) and not any_context(drafter.inner):
        why = f"over {_name(drafter.inner)}, whose state would miss what others draft while it rests"
    elif isinstance(nested := getattr(drafter, "members", None), Members):
        own = [_name(d) for d in nested.drafters if isinstance(d, DraftModel | OtherTokenizer)]
        why = f"an ensemble around {own[0]}, which counts on paths of that ensemble only" if own else None
    if why:
        raise ValueError(f"member {_name(drafter)}, {why}; use it alone")


def _propose_stacked(
    entry: Stack,
    params: Any,
    tables: Any,
    target: Decoder,
    cache: KVCache,
    state: Any,
    context: Context,
    keys: list[Keys],
) -> tuple[list[Draft], Any]:
    def one(params: Any, tables: Any, state: Any, request: jax.Array) -> tuple[Draft, Any]:
        own = dataclasses.replace(keys[0], request=request)
        draft, state, _ = entry.drafter.propose(params, tables, target, cache, state, context, own)
        return draft, state

    requests = jnp.stack([k.request for k in keys])
    drafts, state = jax.vmap(one, in_axes=(0, 0, 1, 0), out_axes=(0, 1))(params, tables, state, requests)
    return [jax.tree.map(lambda x, j=j: x[j], drafts) for j in range(entry.count)], state


def _in_target_ids(draft: Draft, vocab_size: int) -> Draft:
    """The draft with laws over the target's vocabulary, -inf outside the member's own."""
    laws = draft.laws
    if draft.vocab is not None and laws.shape[1]:
        whole = jnp.full((*laws.shape[:2], vocab_size), -jnp.inf)
        laws = whole.at[:, :, draft.vocab].set(laws)
    return dataclasses.replace(draft, laws=laws, vocab=None, resume=None, widths=None)


def _one(entry: Drafter | Stack) -> Drafter:
    return entry.drafter if isinstance(entry, Stack) else entry


def _count(entry: Drafter | Stack) -> int:
    return entry.count if isinstance(entry, Stack) else 1


def _name(drafter: Any) -> str:
    return type(drafter).__name__
