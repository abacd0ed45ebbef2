"""Layer skipping: the target without some of its layers drafts (Draft & Verify, Zhang et al. 2023)."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
from etils import epath

from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Stateless
from specjax.drafting.self_chain import check_chain, draft_chain
from specjax.models import Decoder, KVCache, Tap, View


@dataclasses.dataclass(frozen=True)
class LayerSkip(Stateless):
    """A chain from the target with a set of whole layers left out.

    Drafting reads the target's own cache and writes its scratch slots; verification, a full pass over the same slots,
    overwrites them. So there is no second model and no second cache. `experiments/search_skip.py` searches for a set.

    Attributes:
        skip: layers left out, each 0..n-1; at least one layer must stay.
        num_nodes: N, tokens to draft.
        min_confidence: stop where the likeliest token has less than this probability; 0 drafts all.
    """

    skip: tuple[int, ...]
    num_nodes: int = 4
    min_confidence: float = 0.0
    taps: tuple[Tap, ...] = ()
    num_probes: int = 0

    def __post_init__(self) -> None:
        check_chain(self.num_nodes, self.min_confidence)

    @property
    def depth(self) -> int:
        """The chain's length."""
        return self.num_nodes

    @property
    def draft_passes(self) -> int:
        """Passes through the layers that are left in a step."""
        return self.num_nodes

    def kind(self, sampling: Sampling) -> Kind:
        """Greedy drafts are choices; sampled ones are drawn, one child a node."""
        return "fixed" if sampling.greedy else "iid"

    def init_params(self, key: jax.Array, target: Decoder) -> tuple[Any, Any]:
        """No parameters, no tables: the target's are used.

        Raises:
            ValueError: the skip set names a layer twice or outside the target, or leaves none.
        """
        check_skip(self.skip, target.config.num_layers)
        return super().init_params(key, target)

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
        """N passes through the layers that are left."""
        del params, tables

        def part(tokens: jax.Array, cache: KVCache, view: View) -> tuple[jax.Array, jax.Array, KVCache]:
            out, cache = target.cached(tokens, cache, view, skip=self.skip)
            return out.hidden, out.hidden, cache

        draft, _, cache = draft_chain(
            part,
            lambda hidden: target.logits(target.final_norm(hidden)),
            target,
            cache,
            context,
            keys,
            num_nodes=self.num_nodes,
            min_confidence=self.min_confidence,
            last_pass=False,
            head_size=target.config.head_size,
        )
        return draft, state, cache


def found_set(path: str | epath.Path) -> tuple[int, ...]:
    """The best set of layers in a `search.json`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is none.
    """
    file = epath.Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no search.json at {path}: experiments/search_skip.py writes one")
    try:
        return tuple(int(layer) for layer in json.loads(file.read_text())["best"]["skip"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} holds no best.skip ({error!r}); expected the search.json of experiments/search_skip.py"
        ) from error


def check_skip(skip: tuple[int, ...], layers: int) -> None:
    """Checks a skip set against a model's number of layers.

    Raises:
        ValueError: a layer is named twice or lies outside the model, none is named, or none is left.
    """
    outside = [i for i in skip if not 0 <= i < layers]
    if outside:
        raise ValueError(f"skip names layer {outside[0]}; the target has layers 0 to {layers - 1}")
    if len(set(skip)) < len(skip):
        raise ValueError(f"skip={skip} names a layer twice; name each once")
    if not skip:
        raise ValueError("skip is empty: a draft of every layer costs as much as the target; name layers to leave out")
    if len(skip) == layers:
        raise ValueError(f"skip={skip} leaves none of the target's {layers} layers; keep at least one")
