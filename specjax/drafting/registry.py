"""Drafting methods by name. A method is one file beside this one, one maker and one line here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from etils import epath

from specjax import checkpoints
from specjax.checkpoints import drafters
from specjax.checkpoints.formats import read_head
from specjax.checkpoints.formats.mtp import repeated
from specjax.decoding import Drafter
from specjax.decoding.tree import from_branching, from_choices
from specjax.drafting.adaptive import Adaptive
from specjax.drafting.autoregressive import Autoregressive
from specjax.drafting.draft_model import DraftModel
from specjax.drafting.draft_tree import DraftTree
from specjax.drafting.eagle import EagleChain
from specjax.drafting.eagle2 import EagleTree
from specjax.drafting.eagle_static import EagleStatic
from specjax.drafting.early_exit import EarlyExit
from specjax.drafting.ensemble import EnsembleMixture, EnsembleProxy, EnsembleUnion, EnsembleVote, assemble
from specjax.drafting.heads import choose_tree
from specjax.drafting.hydra import Hydra, HydraPlusPlus
from specjax.drafting.jacobi import Jacobi
from specjax.drafting.kangaroo import Kangaroo
from specjax.drafting.layer_skip import LayerSkip, found_set
from specjax.drafting.lookahead import Lookahead
from specjax.drafting.lookup import lookup
from specjax.drafting.medusa import Medusa
from specjax.drafting.mtp import MultiToken
from specjax.drafting.other_tokenizer import OtherTokenizer, restrict
from specjax.drafting.prompt_lookup import PromptLookup
from specjax.drafting.recycling import Recycling
from specjax.drafting.redrafter import RecurrentDrafter
from specjax.drafting.retrieval import Retrieval, store_tables
from specjax.drafting.suffix import Suffix
from specjax.drafting.suffix_tree import SuffixTree
from specjax.drafting.text_store import index_texts, load_store
from specjax.drafting.token_map import map_tokens
from specjax.models import ModelConfig, Target, merge
from specjax.models.config import check_exit_layer, check_taps
from specjax.models.tokenizer import Tokenizer
from specjax.parallel import Placement


@dataclasses.dataclass(frozen=True, eq=False)
class MadeFor:
    """Which target a drafter was made for, without that target's arrays.

    Attributes:
        name: the target's.
        config_hash: of its architecture.
        tokenizer: what its ids mean.
    """

    name: str
    config_hash: str
    tokenizer: Tokenizer

    def differences(self, target: Target) -> list[str]:
        """What is another one's in `target`, nothing where it may be drafted for: its weights may differ."""
        same = self.tokenizer is target.tokenizer or self.tokenizer.fingerprint() == target.tokenizer.fingerprint()
        found = [] if same else [f"tokenizer {self.tokenizer.fingerprint()} (here {target.tokenizer.fingerprint()})"]
        if self.config_hash != target.config_hash:
            found.append(f"architecture {self.config_hash} (here {target.config_hash})")
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Drafting:
    """A drafter with its arrays.

    Attributes:
        name: registry name, for reports.
        drafter: the method.
        params: trained parameters.
        tables: arrays that are not trained.
        made_for: the target, where it is known.
    """

    name: str
    drafter: Drafter
    params: Any
    tables: Any
    made_for: MadeFor | None = None

    def check_target(self, target: Target) -> None:
        """Checks that it drafts for this target.

        Raises:
            ValueError: it was made for one of another architecture or vocabulary.
        """
        if self.made_for is not None and (differences := self.made_for.differences(target)):
            raise ValueError(
                f"the drafter {self.name!r} was made for the target {self.made_for.name!r}, not for {target.name!r}: "
                f"{', '.join(differences)}. Load it again with load_drafter(..., target) for this one"
            )

    @property
    def param_bytes(self) -> int:
        """Bytes of parameters and tables that the drafter adds to the target."""
        return sum(x.nbytes for x in jax.tree.leaves((self.params, self.tables)))

    def placed(self, placement: Placement | None) -> Drafting:
        """The same drafter with its arrays there; as it is where `placement` is None."""
        if placement is None:
            return self
        params, tables = placement.drafter_params(self.params), placement.everywhere(self.tables)
        return dataclasses.replace(self, params=params, tables=tables)


def require_drafting(made: Any, name: str) -> Drafting:
    """What a maker made; raises ValueError where that is no `Drafting`."""
    if not isinstance(made, Drafting):
        raise ValueError(
            f"drafter {name!r} makes a {type(made).__name__}; expected maker(target, **options) to return a "
            "specjax.drafting.registry.Drafting"
        )
    return made


Maker = Callable[..., Drafting]


# Fields of drafters that are no options: what it is, not what it is asked for.
_FIXED = ("members", "inner", "config", "taps", "num_probes", "topology")


def hands_on_to(method: Any, *others: str) -> Callable[[Maker], Maker]:
    """Says that a maker's other options are the fields of a drafter, and `others`: messages name them."""
    fields = [field.name for field in dataclasses.fields(method) if field.init and field.name not in _FIXED]

    def mark(maker: Maker) -> Maker:
        maker.__dict__["handed_on"] = (*others, *fields)
        return maker

    return mark


def _autoregressive(target: Target, num_nodes: int = 0) -> Drafting:
    del target
    return Drafting("autoregressive", Autoregressive(num_nodes=num_nodes), {}, {})


def _draft_model(
    target: Target,
    source: str,
    num_nodes: int = 4,
    temperature: float = 1.0,
    min_confidence: float = 0.0,
    max_entropy: float = math.inf,
) -> Drafting:
    """A chain of a zoo entry or saved drafter, or of any model that `load_target` reads whose vocabulary fits."""
    config, params, tables, shares = _draft_network(target, source)
    drafter = DraftModel(config, num_nodes, temperature, shares, min_confidence=min_confidence, max_entropy=max_entropy)
    return Drafting("draft_model", drafter, params, tables)


def _draft_tree(
    target: Target,
    source: str,
    branching: Sequence[int] = (3, 2, 1),
    choices: Sequence[Sequence[int]] = (),
    siblings: Literal["iid", "without_replacement"] = "without_replacement",
    temperature: float = 1.0,
) -> Drafting:
    """The same draft's static tree: children of each node by depth (`from_branching`), or by paths (`from_choices`)."""
    config, params, tables, shares = _draft_network(target, source)
    tree = from_choices(choices) if choices else from_branching(branching)
    return Drafting("draft_tree", DraftTree(config, tree, siblings, temperature, shares), params, tables)


def _draft_network(target: Target, source: str) -> tuple[ModelConfig, Any, dict[str, jax.Array], tuple[str, ...]]:
    """Network, parameters, tables and shared groups of a draft for the target."""
    if drafters.is_drafter(source):
        loaded = _trained(target, source, "draft_model")
        # The shared head is among the parameters by now; the embedding stays the target's.
        return loaded.config, loaded.params, loaded.tables, tuple(s for s in loaded.shares if s == "embed")
    try:
        draft = checkpoints.load_target(source, dtype=target.config.dtype)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; or a drafter of the zoo: {', '.join(drafters.zoo_entries())}") from error
    mine, theirs = target.tokenizer.fingerprint(), draft.tokenizer.fingerprint()
    if mine != theirs:
        raise ValueError(
            f"draft {source!r} and target {target.name!r} do not share a vocabulary (fingerprints {theirs} and {mine}, "
            f"{draft.config.head_size} and {target.config.head_size} ids); choose a draft of the same family, or "
            "drafter 'other_tokenizer'"
        )
    config, params = draft.config, draft.params
    tables: dict[str, jax.Array] = {}
    if config.head_size != target.config.head_size:
        # One tokenizer, padded to different sizes: ids that only one of them has are drafted by neither.
        vocab = jnp.arange(min(config.head_size, target.config.head_size), dtype=jnp.int32)
        tables = {"vocab": vocab}
        if config.head_size > len(vocab):
            config, params = restrict(config, params, vocab)
    return config, params, tables, ()


def _other_tokenizer(target: Target, source: str, num_nodes: int = 4, expansion: float = 2.0) -> Drafting:
    """Any model that `load_target` reads, whatever its tokenizer."""
    draft = checkpoints.load_target(source, dtype=target.config.dtype)
    names = (target.name, source)
    tables = map_tokens(target.tokenizer, draft.tokenizer, target.config.vocab_size, names=names).tables()
    config, params = restrict(draft.config, draft.params, tables["draft_ids"])
    # Where its tokenizer begins a text with a token, the draft has seldom read one without.
    begin, bos = draft.tokenizer.encode("a")[:1], draft.tokenizer.bos_id
    drafter = OtherTokenizer(config, num_nodes, expansion, bos if bos is not None and begin == [bos] else -1)
    return Drafting("other_tokenizer", drafter, params, tables)


def _mtp(target: Target, source: str, num_nodes: int = 0) -> Drafting:
    """Heads or modules for the target, ours or in a published layout; `num_nodes` depths of them, 0 for all.

    The only module of a published checkpoint is run as often as `num_nodes` says.
    """
    loaded = repeated(_trained(target, source, "mtp"), num_nodes)
    return Drafting("mtp", MultiToken(loaded.config, num_nodes), loaded.params, loaded.tables)


def _ensemble(name: str, make: Any, prior: str | None = None) -> Maker:
    """The maker of an ensemble.

    Args:
        name: registry name.
        make: the ensemble's class.
        prior: the option that is one number a member, and goes to the tables.
    """

    @hands_on_to(make, *([prior] if prior else []))
    def maker(target: Target, members: Sequence[Mapping[str, Any]], stacked: bool = True, **options: Any) -> Drafting:
        """`members` are rows of a name and its options; the other options are the ensemble's own."""
        made = [_member(target, index, member) for index, member in enumerate(members)]
        parts = [m.drafter for m in made], [m.params for m in made], [m.tables for m in made]
        together, params, tables = assemble(*parts, stacked=stacked)
        priors = {prior: options.pop(prior)} if prior in options else {}
        ensemble = make(together, **options)
        return Drafting(name, ensemble, params, ensemble.tables(tables, **priors))

    return maker


def _row(given: Any, said: str) -> tuple[Any, dict[str, Any]]:
    """Name and options of a row that names a drafter."""
    if not hasattr(given, "keys"):
        raise ValueError(f"{said} is {given!r}; expected a name with its options, as in {{'name': 'prompt_lookup'}}")
    options = dict(given)
    return options.pop("name", None), options


def _member(target: Target, index: int, member: Mapping[str, Any]) -> Drafting:
    name, options = _row(member, f"member {index} of the ensemble")
    if name not in DRAFTERS and ":" not in str(name):
        raise ValueError(f"member {index} of the ensemble is drafter {name!r}; known: {', '.join(sorted(DRAFTERS))}")
    try:
        return require_drafting(lookup(DRAFTERS, name, "drafter")(target, **options), name)
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"member {index} of the ensemble, drafter {name!r}: {error}") from error


def _heads(
    name: str,
    target: Target,
    source: str,
    tree: str = "chain",
    nodes: int = 0,
    choices: Sequence[Sequence[int]] = (),
) -> Drafting:
    """Saved heads with a chain, a calibrated tree of so many nodes, or a tree by its choices (`choose_tree`)."""
    loaded = _trained(target, source, name)
    tables, config = dict(loaded.tables), loaded.config
    shape = choose_tree(config, tables.pop("accuracy", None), tree=tree, nodes=nodes, choices=choices)
    if name == "medusa":
        return Drafting(name, Medusa(config, shape), loaded.params, tables)
    hydra = Hydra if config.prefix is None else HydraPlusPlus
    return Drafting(name, hydra(config, shape), loaded.params, tables)


def _untrained(name: str, method: Callable[..., Any]) -> Maker:
    """The maker of a drafter that trains nothing; its options are checked against the target."""

    @hands_on_to(method)
    def maker(target: Target, **options: Any) -> Drafting:
        drafter = method(**{key: tuple(x) if isinstance(x, list) else x for key, x in options.items()})
        params, tables = drafter.init_params(jax.random.key(0), merge(target.graph, target.params))
        return Drafting(name, drafter, params, tables)

    return maker


@hands_on_to(Retrieval)
def _retrieval(target: Target, source: str, **options: Any) -> Drafting:
    """A store that `save_store` wrote, or a text file to index now."""
    if source.endswith(".npz"):
        store = load_store(source, target.tokenizer)
    elif epath.Path(source).is_file():
        store = index_texts([epath.Path(source).read_text()], target.tokenizer)
    else:
        raise FileNotFoundError(f"no text store at {source!r}; give a .npz of save_store, or a text file")
    return Drafting("retrieval", Retrieval(**options), {}, store_tables(store))


@hands_on_to(LayerSkip)
def _layer_skip(target: Target, source: str = "", **options: Any) -> Drafting:
    """A set of layers, or the best one that a search found: the `search.json` of `experiments/search_skip.py`."""
    given = {name: tuple(options[name]) for name in ("skip", "skip_attention", "skip_mlp") if options.get(name)}
    if bool(given) == bool(source):
        said = ", ".join(f"{name}={layers}" for name, layers in (given or {"skip": ()}).items())
        raise ValueError(f"{said} and source={source!r} of layer_skip; expected one of them")
    return _untrained("layer_skip", LayerSkip)(target, **{**options, **(found_set(source) if source else {})})


@hands_on_to(Adaptive)
def _adaptive(target: Target, inner: Mapping[str, Any], widths: Sequence[int], **options: Any) -> Drafting:
    """`inner` is a row of a name and its options."""
    name, row = _row(inner, "the inner drafter")
    if name not in DRAFTERS and ":" not in str(name):
        raise ValueError(f"the inner drafter is {name!r}; known: {', '.join(sorted(DRAFTERS))}")
    made = require_drafting(lookup(DRAFTERS, name, "drafter")(target, **row), name)
    return Drafting("adaptive", Adaptive(made.drafter, tuple(widths), **options), made.params, made.tables)


def _trained(target: Target, source: str, method: str) -> Any:
    """A `SavedDrafter` of one method: one of ours, or a head in a published layout."""
    saved = drafters.load_drafter(source, target) if drafters.is_drafter(source) else read_head(source, target)
    check_taps(getattr(saved.config, "taps", ()), target.config.num_layers)
    if saved.method != method:
        drafter = "eagle' or 'eagle2" if saved.method == "eagle" else saved.method
        raise ValueError(f"{source!r} is a head of method {saved.method!r}, not {method!r}: use drafter '{drafter}'")
    return saved


def _eagle(target: Target, source: str, num_nodes: int = 4, choices: Sequence[Sequence[int]] = ()) -> Drafting:
    """An EAGLE-1 head drafting a chain, or a static tree by its choices (`from_choices`)."""
    saved = _trained(target, source, "eagle")
    if choices:
        tree = from_choices(choices)
        drafter = EagleStatic(saved.config, tree.num_nodes, tree=tree)
        return Drafting("eagle", drafter, saved.params, saved.tables)
    return Drafting("eagle", EagleChain(saved.config, num_nodes), saved.params, saved.tables)


def _eagle2(target: Target, source: str, num_nodes: int = 24, levels: int = 5, top_k: int = 4) -> Drafting:
    """An EAGLE-1 head drafting a dynamic tree."""
    saved = _trained(target, source, "eagle")
    drafter = EagleTree(saved.config, num_nodes, levels=levels, top_k=top_k)
    return Drafting("eagle2", drafter, saved.params, saved.tables)


def _eagle3(
    target: Target,
    source: str,
    num_nodes: int = 4,
    levels: int = 0,
    top_k: int = 4,
    choices: Sequence[Sequence[int]] = (),
) -> Drafting:
    """An EAGLE-3 head drafting a dynamic tree of so many levels, a static one by its choices, or a chain."""
    saved = _trained(target, source, "eagle3")
    if choices:
        if levels:
            raise ValueError(f"levels={levels} and choices: a tree is dynamic or static; give one of them")
        tree = from_choices(choices)
        return Drafting("eagle3", EagleStatic(saved.config, tree.num_nodes, tree=tree), saved.params, saved.tables)
    dynamic = EagleTree(saved.config, num_nodes, levels=levels, top_k=top_k) if levels else None
    return Drafting("eagle3", dynamic or EagleChain(saved.config, num_nodes), saved.params, saved.tables)


def _kangaroo(
    target: Target, source: str, num_nodes: int = 6, min_confidence: float = 0.6, max_entropy: float = math.inf
) -> Drafting:
    """A trained adapter behind the target's first layers."""
    saved = _trained(target, source, "kangaroo")
    check_exit_layer(saved.config.exit_layer, target.config.num_layers)
    drafter = Kangaroo(saved.config, num_nodes, min_confidence, max_entropy=max_entropy)
    return Drafting("kangaroo", drafter, saved.params, saved.tables)


@hands_on_to(RecurrentDrafter)
def _redrafter(target: Target, source: str, **options: Any) -> Drafting:
    """A ReDrafter network; `num_nodes` of `beams` beams of `levels` tokens."""
    saved = _trained(target, source, "redrafter")
    return Drafting("redrafter", RecurrentDrafter(saved.config, **options), saved.params, saved.tables)


# name -> maker(target, **options)
DRAFTERS: dict[str, Maker] = {
    "adaptive": _adaptive,
    "autoregressive": _autoregressive,
    "early_exit": _untrained("early_exit", EarlyExit),
    "jacobi": _untrained("jacobi", Jacobi),
    "kangaroo": _kangaroo,
    "layer_skip": _layer_skip,
    "lookahead": _untrained("lookahead", Lookahead),
    "recycling": _untrained("recycling", Recycling),
    "retrieval": _retrieval,
    "suffix": _untrained("suffix", Suffix),
    "suffix_tree": _untrained("suffix_tree", SuffixTree),
    "draft_model": _draft_model,
    "draft_tree": _draft_tree,
    "eagle": _eagle,
    "eagle2": _eagle2,
    "eagle3": _eagle3,
    "hydra": partial(_heads, "hydra"),
    "medusa": partial(_heads, "medusa"),
    "ensemble_mixture": _ensemble("ensemble_mixture", EnsembleMixture, "weights"),
    "ensemble_proxy": _ensemble("ensemble_proxy", EnsembleProxy, "worth"),
    "ensemble_union": _ensemble("ensemble_union", EnsembleUnion),
    "ensemble_vote": _ensemble("ensemble_vote", EnsembleVote, "accuracy"),
    "mtp": _mtp,
    "other_tokenizer": _other_tokenizer,
    "prompt_lookup": _untrained("prompt_lookup", PromptLookup),
    "redrafter": _redrafter,
}
