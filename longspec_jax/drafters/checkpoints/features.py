"""How published drafts over the target's features are read and written, whatever their kind.

A kind is a :class:`FeatureFiles`: what its ``config.json`` describes, which tensors it has, and how
both are bound to a target. Its trainers write it in dialects of their own. They store a reduced
vocabulary among the weights: ``d2t`` holds what to add to each of the draft's ids.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike

from longspec_jax.checks import is_whole
from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.draft import Target, pays_in_int8
from longspec_jax.drafters.tables import NOT_WHOLE, FeatureOptions, Sizes, TableParams
from longspec_jax.drafters.vocabulary import check_vocabulary
from longspec_jax.drafters.window import DraftWindow
from longspec_jax.weights.checkpoint import Tensor, Tensors
from longspec_jax.weights.folder import open_folder
from longspec_jax.weights.json_files import JsonObject
from longspec_jax.weights.params import write_model
from longspec_jax.weights.quantised.table import with_matrices
from longspec_jax.weights.tables import MLP, QKV_BIAS_PARTS, QKV_KERNEL, Rule, Table

LAYER_CONFIG = "transformer_layer_config"
"""Where files of speculators describe the layers."""
QKV = Rule("self_qkv/fused/kernel", "D K * H", QKV_KERNEL)
QKV_BIAS = Rule("self_qkv/fused/bias", "K * H", QKV_BIAS_PARTS)
SELF_OUT = Rule("self_out/kernel", "N H D", (("self_attn.o_proj.weight", "D (N H)"),))
_MLP_NORM = Rule("mlp_norm/scale", "D", (("post_attention_layernorm.weight", "D"),))
_QK_NORM = (
    Rule("q_norm/scale", "H", (("self_attn.q_norm.weight", "H"),)),
    Rule("k_norm/scale", "H", (("self_attn.k_norm.weight", "H"),)),
)
EMBEDDING = (Rule("embedding", "V D", (("embed_tokens.weight", "V D"),)),)
_HEAD = (Rule("head", "v D", (("lm_head.weight", "v D"),)),)
BLOCK_HEADS = "markov", "confidence", "selector"
"""Of drafts that propose a block, besides the layers."""
OFFSETS, MEMBERS = "d2t", "t2d"
"""What to add to each of the draft's ids, and which of the target's tokens it knows."""
DROPPED = {
    r"verifier_(norm|lm_head)\.weight": "the target has its own",
    MEMBERS: "it follows from d2t, with which it is compared",
}
"""Tensors that no draft over the target's features needs."""
_PREFIX = "model."
"""Stands before all names in some files."""


@runtime_checkable
class FeatureConfig(Sizes, Protocol):
    """A draft's configuration, as far as all kinds have it."""

    def check_fits(self, target: TargetConfig) -> None:
        """Raise ValueError unless this draft can read the target's features and tokens."""
        ...


@runtime_checkable
class FeatureDraft(Protocol):
    """A loaded draft, as far as all kinds have it."""

    @property
    def seen(self) -> DraftWindow:
        """Which tokens it sees."""
        ...


C = TypeVar("C", bound=FeatureConfig)
P = TypeVar("P", bound=TableParams)
D = TypeVar("D", bound=FeatureDraft)


@dataclass(frozen=True)
class FeatureDialect:
    """How a family of trainers writes drafts of a kind."""

    name: str
    entering: bool = False
    """Whether layers are counted by the hidden states that enter them, not by those that leave."""
    mark: str = ""
    """What its ``config.json`` is identified by, for messages."""
    layer: str = ""
    """What the names of a single layer's tensors begin with."""


@dataclass(frozen=True)
class Described(Generic[C]):
    """What the files of a draft hold."""

    config: C
    table: Table
    """Of its tensors."""
    tensors: Tensors
    """Under the names of the table."""
    tied: bool = False
    """Whether an absent LM head is the draft's own embedding."""
    groups: Mapping[str, int] = field(default_factory=dict)
    """Inputs that share a scale, of every quantised kernel by path."""


@dataclass(frozen=True)
class FeatureFiles(Generic[C, P, D]):
    """How the files of a kind of drafts are read and written."""

    describe: Callable[[JsonObject, Tensors, TargetConfig, Any], Described[C]]
    """What a ``config.json`` and the tensors next to it hold, for a target, with options."""
    bound: Callable[..., P]
    """The parameters, as :meth:`.TableParams.bound` makes them."""
    bind: Callable[..., D]
    """The draft with its options applied, as ``Eagle3Draft.bind`` makes it."""
    options: type[FeatureOptions]
    made_for: Callable[[C], int | None]
    """Positions that it was made for; None if it was trained with a window."""
    raw: Callable[[C], dict[str, Any]] | None = None
    """A ``config.json`` that is read as a configuration; None for a kind that is not written."""
    table: Callable[[C, bool, bool], Table] | None = None
    """The tensors of a draft, given whether an embedding and an LM head are stored."""

    def load_draft(
        self,
        source: str | Path,
        target: Target,
        options: FeatureOptions | None = None,
        *,
        mesh: Mesh | None = None,
        revision: str | None = None,
    ) -> tuple[C, P]:
        """Load a draft in any of the published dialects: its configuration and its parameters.

        Args:
          source: a folder with ``config.json`` and weights, or a hub id.
          target: what it drafts for, of which it may share tables.
          options: of its kind; the usual ones if absent.
          mesh: devices to shard over by the project's rules; the first device if absent.
          revision: branch, tag or commit of a hub id.

        Raises:
          FileNotFoundError: if the draft or one of its files is missing.
          ValueError: if the draft does not belong to the target, its layers are not computed here,
            or its files are damaged, do not fit together or can be read in two ways.
        """
        config, given = target.config, options or self.options()
        with open_folder(source, mesh, revision) as folder:
            found = self.describe(folder.raw, folder.tensors, config, given)
            with folder.raw.named():
                found.config.check_fits(config)
                vocabulary = vocabulary_of(found.tensors, found.config)
            layer = folder.params(found.table, found.tensors, config.dtype)
        layer = with_matrices(layer, found.groups)
        return found.config, self.bound(
            layer, found.config, config, target.params, vocabulary, found.tied
        )

    def load(
        self,
        source: str | Path,
        target: Target,
        options: FeatureOptions | None = None,
        *,
        mesh: Mesh | None = None,
        revision: str | None = None,
    ) -> D:
        """The same bound to its target; says what it sees of a text if nobody named it."""
        given = options or self.options()
        config, params = self.load_draft(source, target, given, mesh=mesh, revision=revision)
        int8 = pays_in_int8(target) if given.int8 is None else given.int8
        draft = self.bind(config, params, target.config, given, int8=int8, mesh=mesh)
        made_for = self.made_for(config)
        if draft.seen.window is not None and given.window is None and made_for is not None:
            warnings.warn(
                f"{source}: the draft was made for {int(made_for * (given.yarn or 1))} positions "
                f"and the target for {target.config.max_positions}, so it sees the first "
                f"{draft.seen.sinks} and the last {draft.seen.window} tokens of a text; the draft "
                "option window=N changes that",
                stacklevel=2,
            )
        return draft

    def save_draft(self, folder: str | Path, config: C, params: P) -> None:
        """Save a draft in the dialect that is written, wherever it came from.

        Args:
          folder: made if absent; weights in it are replaced, other files stay.
          config: the draft's configuration.
          params: its parameters, of any sharding; not in 8 bits. Tables of the target's are not
            stored.

        Raises:
          ValueError: for parameters in 8 bits.
        """
        assert self.raw is not None and self.table is not None
        raw, stored = self.raw(config), stored_params(params)
        table = self.table(config, "embedding" in stored, "head" in stored)
        more = vocabulary_tensors(params.vocabulary, config.vocab_size)
        write_model(Path(folder).expanduser(), table, stored, raw["torch_dtype"], raw, more)


def llama_rules(config: Any) -> tuple[Rule, ...]:
    """Rules of a Llama's layer, by its switches: all but :data:`QKV` and the norms before."""
    switched = (QKV_BIAS,) * config.qkv_bias + _QK_NORM * config.qk_norm
    return SELF_OUT, _MLP_NORM, *MLP, *switched


def own_tables(*, embedding: bool, head: bool) -> tuple[Rule, ...]:
    """The rules of the tables that are stored with a draft."""
    return EMBEDDING * embedding + _HEAD * head


def counting(*, entering: bool) -> str:
    """What the numbers of hidden states count in a file."""
    return f"the hidden states that {'enter' if entering else 'leave'} the layers"


def features_of(
    raw: JsonObject, key: str, target_layers: int, dialect: FeatureDialect
) -> tuple[int, ...]:
    """The layers after which a file says that hidden states are taken; -1 is the embedding.

    Args:
      raw: what holds the key.
      key: of a list of numbers.
      target_layers: how many layers the target has.
      dialect: how the file counts them.

    Raises:
      ValueError: if it is not a list of such numbers.
    """
    ids, least = raw.values[key], dialect.entering - 1
    most = least + target_layers
    listed = isinstance(ids, list) and bool(ids)
    if not listed or not all(is_whole(each) and least <= each <= most for each in ids):
        raise raw.error(
            key,
            f"must be layers of the target, {least} to {most}: it has {target_layers} layers, and "
            f"{dialect.name} counts {counting(entering=dialect.entering)}",
            "load the draft that belongs to this target",
        )
    return tuple(each - dialect.entering for each in ids)


def stored_params(params: TableParams) -> dict[str, Any]:
    """The layers, the tables that the file has, and the heads of a draft that has some.

    Raises:
      ValueError: for parameters in 8 bits.
    """
    if params.int8:
        raise ValueError("the draft is in 8 bits; load it with int8=False to save it")
    found = {**params.layer}
    if params.stores_embedding:
        found["embedding"] = params.embedding
    if params.stores_head:
        found["head"] = params.head
    heads = {name: getattr(params, name, None) for name in BLOCK_HEADS}
    return found | {name: head for name, head in heads.items() if head is not None}


def vocabulary_of(tensors: Tensors, draft: Sizes) -> np.ndarray | None:
    """The target's tokens that the draft knows, taken out of its tensors; None for all of them.

    ``d2t`` holds offsets: the target's id is the draft's plus the offset at it.
    """
    offsets, members = tensors.pop(OFFSETS, None), tensors.get(MEMBERS)
    if offsets is None:
        if draft.proposable != draft.vocab_size:
            raise ValueError(
                f"the draft knows {draft.proposable} of {draft.vocab_size} tokens, and d2t, "
                f"which says which, is not among its tensors; {NOT_WHOLE}"
            )
        return None
    if offsets.shape != (draft.proposable,):
        raise ValueError(
            f"d2t {offsets.shape} must have draft_vocab_size={draft.proposable} numbers; use the "
            "config.json that was saved with the weights"
        )
    tokens = check_vocabulary(np.arange(draft.proposable) + _whole(offsets), draft.vocab_size)
    if members is not None:
        listed = np.flatnonzero(_whole(members))
        if members.shape != (draft.vocab_size,) or not np.array_equal(np.sort(tokens), listed):
            raise ValueError(
                f"d2t names {len(tokens)} tokens and t2d {members.shape} marks {len(listed)}, and "
                f"they must be the same ones of the target's {draft.vocab_size}; {NOT_WHOLE}"
            )
    same = len(tokens) == draft.vocab_size and bool((tokens == np.arange(len(tokens))).all())
    return None if same else tokens


def vocabulary_tensors(vocabulary: ArrayLike | None, vocab_size: int) -> dict[str, np.ndarray]:
    """The inverse of :func:`vocabulary_of`: ``d2t`` and ``t2d``; none for all tokens."""
    if vocabulary is None:
        return {}
    tokens = np.asarray(vocabulary, np.int64)
    offsets = tokens - np.arange(len(tokens))
    return {OFFSETS: offsets, MEMBERS: np.isin(np.arange(vocab_size), tokens)}


def _whole(tensor: Tensor) -> np.ndarray:
    """A small tensor of whole numbers."""
    if len(tensor.shape) != 1:
        raise ValueError(f"d2t and t2d must be lists, got {tensor.shape}; {NOT_WHOLE}")
    return tensor.read((slice(None),))


def without_prefix(tensors: Tensors) -> Tensors:
    """The tensors under their usual names, where all carry a prefix."""
    named: Mapping[str, Tensor] = tensors
    if not all(name.startswith(_PREFIX) for name in named if name not in (OFFSETS, MEMBERS)):
        return dict(named)
    return {name.removeprefix(_PREFIX): tensor for name, tensor in named.items()}
