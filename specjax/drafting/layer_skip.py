"""Layer skipping: the target without some of its layers or sublayers drafts (Draft & Verify, Zhang et al. 2023)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any

import jax
from etils import epath

from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Stateless
from specjax.drafting.self_chain import check_chain, draft_chain
from specjax.models import Activations, Decoder, KVCache, Tap, View


@dataclasses.dataclass(frozen=True)
class LayerSkip(Stateless):
    """A chain from the target with a set of layers left out, whole or one of their two sublayers (section 3.2).

    Drafting reads the target's own cache and writes its scratch slots, where its attention runs; verification, a full
    pass over the same slots, overwrites them and fills those that were left out. So there is no second model and no
    second cache. `experiments/search_skip.py` searches for a set.

    Attributes:
        skip: layers left out whole, each 0..n-1.
        num_nodes: N, tokens to draft.
        min_confidence: stop where the likeliest token has less than this probability; 0 drafts all.
        skip_attention: layers of which the attention is left out as well.
        skip_mlp: layers of which the MLP is left out as well. At least one sublayer must stay.
        max_entropy: stop where the law's entropy in nats is greater; infinity drafts all.
    """

    skip: tuple[int, ...] = ()
    num_nodes: int = 4
    min_confidence: float = 0.0
    taps: tuple[Tap, ...] = ()
    num_probes: int = 0
    skip_attention: tuple[int, ...] = ()
    skip_mlp: tuple[int, ...] = ()
    max_entropy: float = math.inf

    def __post_init__(self) -> None:
        check_chain(self.num_nodes, self.min_confidence, self.max_entropy)

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
            ValueError: the skip set names a layer twice or outside the target, or leaves nothing.
        """
        check_skip(target.config.num_layers, self.skip, self.skip_attention, self.skip_mlp)
        return super().init_params(key, target)

    def run(
        self, target: Decoder, tokens_bt: jax.Array, cache: KVCache, view: View, taps: tuple[Tap, ...] = ()
    ) -> tuple[Activations, KVCache]:
        """A pass of the target over tokens `[B, T]` through what is left."""
        return target.cached(
            tokens_bt,
            cache,
            view,
            skip=self.skip,
            skip_attention=self.skip_attention,
            skip_mlp=self.skip_mlp,
            taps=taps,
        )

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
        """N passes through what is left."""
        del params, tables

        def part(tokens: jax.Array, cache: KVCache, view: View) -> tuple[jax.Array, jax.Array, KVCache]:
            out, cache = self.run(target, tokens, cache, view)
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
            max_entropy=self.max_entropy,
            last_pass=False,
            head_size=target.config.head_size,
        )
        return draft, state, cache


def skip_options(attention: Iterable[int], mlp: Iterable[int]) -> dict[str, tuple[int, ...]]:
    """The options of `LayerSkip` that leave out these layers' attentions and these layers' MLPs."""
    attention, mlp = set(attention), set(mlp)
    parts = {"skip": attention & mlp, "skip_attention": attention - mlp, "skip_mlp": mlp - attention}
    return {name: tuple(sorted(layers)) for name, layers in parts.items()}


def found_set(path: str | epath.Path) -> dict[str, tuple[int, ...]]:
    """The best set in a `search.json`, as options of `LayerSkip`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is none.
    """
    file = epath.Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no search.json at {path}: experiments/search_skip.py writes one")
    try:
        best = json.loads(file.read_text())["best"]
        # A search over whole layers names no others.
        parts = {"skip": best["skip"], **{name: best.get(name, ()) for name in ("skip_attention", "skip_mlp")}}
        return {name: tuple(int(layer) for layer in layers) for name, layers in parts.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} holds no best.skip ({error!r}); expected the search.json of experiments/search_skip.py"
        ) from error


def check_skip(
    layers: int, skip: tuple[int, ...], skip_attention: tuple[int, ...] = (), skip_mlp: tuple[int, ...] = ()
) -> None:
    """Checks a skip set against a model's number of layers.

    Args:
        layers: of the model.
        skip: as in `LayerSkip`, like the others.
        skip_attention: see `skip`.
        skip_mlp: see `skip`.

    Raises:
        ValueError: a layer is named twice or lies outside the model, none is named, or nothing is left.
    """
    named = {"skip": skip, "skip_attention": skip_attention, "skip_mlp": skip_mlp}
    for name, part in named.items():
        outside = [i for i in part if not 0 <= i < layers]
        if outside:
            raise ValueError(f"{name} names layer {outside[0]}; the target has layers 0 to {layers - 1}")
        if len(set(part)) < len(part):
            raise ValueError(f"{name}={part} names a layer twice; name each once")
        both = sorted(set(part) & set(skip))
        if name != "skip" and both:
            raise ValueError(f"skip leaves out layer {both[0]} whole, and {name} names it too; name it in one of them")
    if not any(named.values()):
        raise ValueError(
            "skip is empty, and so are skip_attention and skip_mlp: a draft of every layer costs as much as the target "
            "does; name layers to leave out"
        )
    if 2 * len(skip) + len(skip_attention) + len(skip_mlp) == 2 * layers:
        said = ", ".join(f"{name}={part}" for name, part in named.items() if part)
        raise ValueError(f"{said} leaves none of the target's {layers} layers; keep at least one, or a sublayer of one")
