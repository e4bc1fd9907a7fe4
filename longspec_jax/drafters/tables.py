"""Drafts over the target's features: what must agree with the target, and tables that are its own.

Such a draft reads hidden states of some layers of the target, and its embedding and LM head where
it has none itself.
"""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Float, Int, PyTree

from longspec_jax.axes import Array, Leaf
from longspec_jax.config.layers import LARGEST_FACTOR
from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.window import DraftWindow
from longspec_jax.models.layers import rounded
from longspec_jax.models.target import (
    head_of,
    scaled,
    shares_head,
    stored_logits,
    target_logits,
)
from longspec_jax.ops.embedding import look_up
from longspec_jax.ops.matmul.packed_shares import packed_params
from longspec_jax.ops.matmul.quantised_weights import QuantisedMatrix, QuantisedWeights
from longspec_jax.sharding import param_shardings

SINKS = 4
"""First entries that a draft sees besides its window, unless it was trained with a window."""
MOST_SINKS = 64
"""They are read at every level, in the buffer of the tree."""
NOT_WHOLE = (
    "the file is not whole: download it again, or, if it was published so, load another draft"
)
"""What to do where a draft lacks what its target cannot stand in for."""
P = TypeVar("P", bound="TableParams")
B = TypeVar("B", bound="BlockParams")


@dataclass(frozen=True)
class FeatureOptions:
    """Options of every draft over the target's features; none changes a token."""

    window: int | None = None
    """How many of the last tokens it sees: its memory is constant. All of them if the target's
    range is not longer.

    If absent, what it was trained for, where the target's range is longer."""
    sinks: int | None = None
    """How many of the first tokens it sees besides the window; 4 if absent, none where it was
    trained with a window of its own."""
    layers: str | None = None
    """Layers of the target after which it takes the hidden states, such as ``1,15,28``, -1 for the
    embedding; as its file says if absent."""
    int8: bool | None = None
    """Read its weights and its LM head in 8 bits: half the bytes.

    If absent, on a GPU with a large target in 16 bits, where it pays."""
    yarn: float | None = None
    """Stretch its positions by this factor with YaRN, though it was not trained so."""

    def __post_init__(self) -> None:
        if self.window == 0:
            raise ValueError("window=0 must be at least 1 token")
        if self.sinks is not None and self.sinks > MOST_SINKS:
            raise ValueError(f"sinks={self.sinks} must be at most {MOST_SINKS} tokens")
        if self.yarn is not None and not 1 < self.yarn <= LARGEST_FACTOR:
            raise ValueError(f"yarn={self.yarn:g} must be a factor above 1")
        if self.layers is not None and not re.fullmatch(
            r"-?[0-9]{1,4}(,-?[0-9]{1,4})*", self.layers
        ):
            raise ValueError(
                f"layers={self.layers!r} must be numbers of layers with commas between, such as "
                "1,15,28"
            )

    @property
    def features(self) -> tuple[int, ...] | None:
        """The layers as numbers; None for those that the file names."""
        return None if self.layers is None else tuple(map(int, self.layers.split(",")))

    def seen(
        self, made_for: int, target: TargetConfig, spare: int, trained: int | None = None
    ) -> DraftWindow:
        """Which tokens a draft sees, by its options and else by the range that it was made for.

        Args:
          made_for: positions of the draft.
          target: what it drafts for.
          spare: positions of a tree or a block, which sinks and window leave free of that range.
          trained: tokens that it saw of each text in training, its own included; all if None.
        """
        sinks, window = self.sinks, self.window
        if sinks is None:
            sinks = 0 if trained is not None and window is None else SINKS
        if window is None and trained is not None:
            window = trained - 1
        if window is None and made_for < target.max_positions:
            window = max(1, made_for - sinks - spare)
        if window is None or window >= target.max_positions:
            return DraftWindow(None, 0)
        return DraftWindow(window, sinks)


@runtime_checkable
class Sizes(Protocol):
    """What must agree of a draft and its target."""

    @property
    def model_width(self) -> int:
        """Width of the draft's hidden states."""
        ...

    @property
    def target_width(self) -> int:
        """Width of the target's hidden states."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens of the target."""
        ...

    @property
    def proposable(self) -> int:
        """Tokens that the draft's LM head knows."""
        ...

    @property
    def features(self) -> tuple[int, ...]:
        """Layers after which it takes the target's hidden states; -1 is the embedding."""
        ...


def check_fits(draft: Sizes, target: TargetConfig) -> None:
    """Raise ValueError unless a draft can read the target's features and tokens."""
    check_sizes(draft.target_width, draft.vocab_size, target)
    outside = [layer for layer in draft.features if not -1 <= layer < target.num_layers]
    if outside or not draft.features:
        raise ValueError(
            f"the draft takes the target's hidden states after the layers {draft.features}, "
            f"counted from 0 with -1 for the embedding; the target has {target.num_layers} "
            "layers: load the draft that belongs to this target, or name its layers with "
            "layers=1,15,28"
        )


def check_proposable(draft: Sizes) -> None:
    """Raise ValueError unless the tokens that a draft proposes are some of its target's."""
    if draft.proposable > draft.vocab_size:
        raise ValueError(
            f"draft_vocab_size={draft.proposable} is above vocab_size={draft.vocab_size}: a draft "
            "proposes some of its target's tokens"
        )


def check_sizes(width: int, vocab_size: int, target: TargetConfig) -> None:
    """Raise ValueError unless a draft was made for hidden states and a vocabulary of these sizes.

    Args:
      width: of the hidden states that it reads.
      vocab_size: tokens of the target that it was made for.
      target: what it would draft for.
    """
    made_for = {"hidden_size": width, "vocab_size": vocab_size}
    theirs = {"hidden_size": target.model_width, "vocab_size": target.vocab_size}
    for name, size in made_for.items():
        if size != theirs[name]:
            raise ValueError(
                f"the draft was made for a target of {name}={size}, the target has "
                f"{name}={theirs[name]}; load the draft that belongs to this target"
            )


@struct.dataclass
class TableParams:
    """A draft's layers and its tables, some of which may be the target's."""

    layer: PyTree
    """Parameters of the draft's module."""
    embedding: Leaf[Float[Array, "V D"]]
    """The embedding table."""
    head: Leaf[Float[Array, "v D"]] | QuantisedWeights
    """The LM head."""
    vocabulary: Leaf[Int[Array, " v"]] | None = None
    """The target's tokens that the rows of ``head`` stand for; token ``i`` is the i-th if
    absent."""
    own_embedding: bool = struct.field(pytree_node=False, default=True)
    """Whether the embedding is not the target's."""
    own_head: bool = struct.field(pytree_node=False, default=True)
    """Whether the LM head is not the target's."""
    stores_embedding: bool = struct.field(pytree_node=False, default=True)
    """Whether the draft's file has an embedding."""
    stores_head: bool = struct.field(pytree_node=False, default=True)
    """Whether the draft's file has an LM head."""
    embedding_factor: float = struct.field(pytree_node=False, default=1.0)
    """Factor on embeddings: the target's, where the draft stores none."""
    logits_divisor: float = struct.field(pytree_node=False, default=1.0)
    """Logits are divided by it, as the target's, where the draft stores no LM head."""
    logit_cap: float | None = struct.field(pytree_node=False, default=None)
    """Bounds logits softly after the division, likewise."""

    @property
    def int8(self) -> bool:
        """Whether this is the result of :meth:`in_int8`."""
        return isinstance(self.head, QuantisedWeights)

    def in_int8(self: P, mesh: Mesh | None = None) -> P:
        """Copies of the matmuls' weights and of the LM head in 8 bits: half the bytes.

        Args:
          mesh: what they are spread over; one device if absent.

        Raises:
          ValueError: if the draft is in 8 bits already.
        """
        head = self.head
        if isinstance(head, QuantisedWeights):
            raise ValueError("the draft is in 8 bits already; call in_int8 once")
        parts = {"layer": rounded(self.layer), "head": QuantisedMatrix.rounded(head)}
        laid_out = _laid_out(parts, self.embedding.dtype, mesh)
        return dataclasses.replace(
            self, own_head=True, layer=laid_out["layer"], head=laid_out["head"]
        )

    @property
    def own_params(self) -> Any:
        """The parameters that are not shared with the target."""
        tables = (
            self.embedding if self.own_embedding else None,
            self.head if self.own_head else None,
        )
        return self.layer, *tables, self.vocabulary

    def logits(self, hidden: Array) -> Array:
        """Logits ``[..., v]`` of the tokens that can be proposed, in float32."""
        products = stored_logits(self.head, hidden)
        return target_logits(products, self.logits_divisor, self.logit_cap)

    def embedded(self, tokens: Array) -> Array:
        """Embeddings ``[B, T, D]`` of tokens ``[B, T]``."""
        return scaled(look_up(self.embedding, tokens), self.embedding_factor)

    @classmethod
    def with_target_tables(cls: type[P], target_params: PyTree, layer: PyTree) -> P:
        """Parameters of a draft's module with the tables of their target."""
        tables = target_params["embedding"], head_of(target_params)
        own_head = not shares_head(target_params)
        return cls(layer, *tables, own_embedding=False, own_head=own_head)

    @classmethod
    def bound(
        cls: type[P],
        layer: dict[str, Any],
        draft: Sizes,
        target: TargetConfig,
        target_params: PyTree,
        vocabulary: ArrayLike | None = None,
        tied: bool = False,
    ) -> P:
        """The parameters, with tables of the target where the draft stores none, or equal ones.

        Trainers freeze the embedding, so that a stored one usually equals the target's, which is
        then not kept twice. The target's factors are for tables that are not stored: who stores
        one trained with it as it is.

        Args:
          layer: of the draft's module, with ``embedding`` and ``head`` where they are stored.
          draft: its sizes.
          target: the target's configuration, whose factors its tables have.
          target_params: its parameters.
          vocabulary: ids of the tokens that it may propose; all if absent.
          tied: whether an absent head is the draft's own embedding.

        Raises:
          ValueError: if a table is missing that the target cannot stand in for.
        """
        stores_embedding = "embedding" in layer
        factor = 1.0 if stores_embedding else target.embedding_factor
        shared: jax.Array = target_params["embedding"]
        embedding: jax.Array = layer.pop("embedding", shared)
        same = _is(embedding, shared)
        if same and draft.model_width != draft.target_width:
            raise ValueError(
                f"the draft has no embed_tokens.weight, and its hidden_size={draft.model_width} is "
                f"not the target's {draft.target_width}, whose embedding it would share; "
                f"{NOT_WHOLE}"
            )
        own_embedding = not same
        embedding = shared if same else embedding
        own_head = "head" in layer or (tied and own_embedding)
        head: jax.Array = layer.pop("head", embedding if tied else head_of(target_params))
        if head.shape != (draft.proposable, draft.model_width):
            raise ValueError(
                f"the draft has no lm_head.weight [{draft.proposable}, {draft.model_width}], and "
                f"the LM head that it would share is {list(head.shape)}; {NOT_WHOLE}"
            )
        tokens = None if vocabulary is None else jnp.asarray(vocabulary)
        params = cls(
            layer,
            embedding,
            head,
            tokens,
            own_embedding,
            own_head,
            stores_embedding=stores_embedding,
            stores_head=own_head,
            embedding_factor=factor,
        )
        if own_head:
            return params
        return dataclasses.replace(
            params,
            own_head=not shares_head(target_params),
            logits_divisor=target.logits_divisor,
            logit_cap=target.logit_cap,
        )


@struct.dataclass
class BlockParams(TableParams):
    """Parameters of a draft that proposes a block, with its Markov head (DSpark, 3.2)."""

    markov: PyTree = None
    """``embedding [V, r]`` of the token before, ``head [v, r]``, and for a gated or a recurrent
    head the projection ``fuse``; None without such a head."""

    @property
    def own_params(self) -> Any:
        """The parameters that are not shared with the target."""
        return *super().own_params, self.markov

    def in_int8(self: B, mesh: Mesh | None = None) -> B:
        """See :class:`TableParams`; the Markov head's larger table too."""
        small: Any = super().in_int8(mesh)
        if self.markov is None:
            return small
        markov = self.markov | {"head": QuantisedMatrix.rounded(self.markov["head"])}
        laid_out = _laid_out({"markov": markov}, self.embedding.dtype, mesh)
        return dataclasses.replace(small, markov=laid_out["markov"])


def _laid_out(parts: dict[str, Any], dtype: DTypeLike, mesh: Mesh | None) -> dict[str, Any]:
    """Weights of 8 bits in the order of the kernel, spread over a mesh if there is one."""
    if mesh is not None:
        parts = jax.device_put(parts, param_shardings(mesh, parts))
    return packed_params(parts, dtype)


def _is(stored: jax.Array, shared: jax.Array) -> bool:
    """Whether a table equals the target's."""
    if stored is shared:
        return True
    same = stored.shape == shared.shape and stored.dtype == shared.dtype
    return same and bool(_equal(stored, shared))


@jax.jit
def _equal(a: jax.Array, b: jax.Array) -> jax.Array:
    return (a == b).all()
