"""TokenSwift (arXiv 2502.18890): one forward of the target over a part of its cache, then heads.

    python -m infer.decode --target=FOLDER --draft=contrib.tokenswift:FOLDER

The forward runs the pending token and yields the target's own logits of the next one. Each head
adds one linear map to the stream of the head before, the first to what leaves the target's last
layer, and the target's LM head makes logits of it after a norm (arXiv 2502.18890, section 3). So a
tree has a level for the forward and one for each head, and its first level is as good as the part
of the cache is.

The paper chooses that part by the keys that a last query attends to, anew when as many tokens have
been emitted. Here it is chosen in every round.

The paper reuses tokens: it appends the row's most frequent n-grams that begin with a token of the
first level as further branches. Here they compete for the places of the same tree: after such a
token, what the heads expect is mixed with what followed the path where the row has it already
(section 3.2 there).

The heads lie among the target's own tensors, as ``model.medusa_layers.{head}.*``. ``medusa_heads``
of the target's ``config.json`` counts them. So target and draft may be one folder.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Float, Int

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.checks import whole_number
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import MAX_TREE_LEVELS, TreeConfig
from longspec_jax.drafters.base import Committed, Drafter, Needs, Params, SamplingNoise, View
from longspec_jax.drafters.draft import DefaultTrees, Draft, Target
from longspec_jax.drafters.ngram import NgramState, best_places
from longspec_jax.drafters.registry import Kind
from longspec_jax.drafters.retrieval.selection import Quest, Selector, SinksAndRecent
from longspec_jax.drafters.tables import check_sizes
from longspec_jax.drafters.tree import Tree, beam_search, root_tree
from longspec_jax.models.target import head_logits, head_of, target_logits
from longspec_jax.ops.layer import rms_norm
from longspec_jax.ops.matmul.few_rows import matmul
from longspec_jax.ops.selection.blocks import BlockBudget
from longspec_jax.ops.slicing import along
from longspec_jax.weights.folder import open_folder
from longspec_jax.weights.tables import Rule, Table, bind

KIND = Kind("contrib.tokenswift:TokenSwiftOptions", "contrib.tokenswift:load", package="")

PLACES = 32
"""Latest places of the row that are looked at after a token of the first level."""
REUSED = 0.5
"""Share of what followed there, besides what the heads expect."""


@dataclass(frozen=True)
class TokenSwiftConfig:
    """Shape of the heads."""

    heads: int
    model_width: int
    """Of the target, as all that follows."""
    vocab_size: int
    layers: int
    norm_eps: float
    dtype: str = "bfloat16"
    logits_divisor: float = 1.0
    logit_cap: float | None = None

    def __post_init__(self) -> None:
        whole_number("medusa_heads", self.heads, 1, MAX_TREE_LEVELS - 1)

    def check_fits(self, target: TargetConfig) -> None:
        """Raise ValueError unless the heads can read the target's hidden states."""
        check_sizes(self.model_width, self.vocab_size, target)


@struct.dataclass
class TokenSwiftParams:
    """The heads, and the target's LM head."""

    heads: Any
    """By ``heads_0`` ...: a norm, a linear map and a norm each."""
    table: Leaf[Float[Array, "V D"]]
    """The target's LM head."""

    def logits(
        self, config: TokenSwiftConfig, hidden: Float[Array, "B D"], heads: int
    ) -> Float[Array, "B n V"]:
        """What the first heads make of what leaves the target's last layer, float32."""
        states = []
        for index in range(heads):
            head = self.heads[f"heads_{index}"]
            normed = rms_norm(hidden, head["input_norm"]["scale"], config.norm_eps)
            hidden = hidden + matmul(normed.astype(hidden.dtype), head["block_0"]["kernel"])
            normed = rms_norm(hidden, head["output_norm"]["scale"], config.norm_eps)
            states.append(normed.astype(hidden.dtype))
        products = head_logits(self.table, jnp.stack(states, axis=1))
        return target_logits(products, config.logits_divisor, config.logit_cap)


@struct.dataclass
class TokenSwiftState:
    """What a row keeps."""

    chosen: Any
    """The selector's state."""
    row: NgramState
    """The row's tokens."""


@dataclass(frozen=True)
class TokenSwiftDrafter(Drafter):
    """Proposes the tree of the best tokens of forward and heads, by cumulative log-probability."""

    config: TokenSwiftConfig
    tree: TreeConfig = TreeConfig()
    attention: str | None = None
    """Implementation of the choice among a level's continuations; chosen automatically if
    absent."""
    selector: Selector = SinksAndRecent(16, 4080)
    """Chooses what the forward sees."""
    name: str = field(default="tokenswift", init=False)

    def __post_init__(self) -> None:
        if self.tree.num_levels > self.config.heads + 1:
            raise ValueError(
                f"tree {self.tree} has {self.tree.num_levels} levels, and the draft has "
                f"{self.config.heads} heads: one level for each and one for the target itself; "
                "name a tree of fewer levels"
            )

    @cached_property
    def needs(self) -> Needs:
        """What the selector needs, and all tokens."""
        return self.selector.needs | Needs()

    def begin(self, params: Params, batch: int, capacity: int) -> TokenSwiftState:
        """No tokens yet."""
        chosen = self.selector.begin(batch, capacity)
        return TokenSwiftState(chosen, NgramState.begin(batch, capacity))

    def extend(
        self, params: Params, state: TokenSwiftState, committed: Committed
    ) -> TokenSwiftState:
        """Let the selector learn of committed tokens, and keep them."""
        chosen = self.selector.extend(state.chosen, committed)
        return TokenSwiftState(chosen, state.row.extended(committed))

    def gathered_slots(self, capacity: int) -> int:
        """The slots that the selector copies."""
        return self.selector.gathered_slots(capacity)

    def propose(
        self, params: Params, state: TokenSwiftState, view: View, noise: SamplingNoise
    ) -> Tree:
        """Run the pending token and the heads, and grow the tree over what they say."""
        levels, draft, last = self.tree.num_levels, params.draft, self.config.layers - 1
        if not levels:
            return root_tree(view.pending, self.tree)
        run = view.partial_forward(
            view.pending[:, None],
            view.position[:, None],
            self.selector.choose(state.chosen, view),
            view.uncommitted(1),
            jnp.ones((len(view.pending), 1, 1), bool),
            0,
            Needs(hidden=(last,)),
        )
        logits = run.logits
        if levels > 1:
            behind = draft.logits(self.config, run.features.hidden[last][:, 0], levels - 1)
            logits = jnp.concatenate([logits, behind], axis=1)

        text = state.row.text(view.pending, view.position)
        behind = jnp.full((len(text), self.tree.widths[0], PLACES, max(levels - 1, 1)), -1)

        def score(behind: Array, tree: Tree, nodes: slice, depth: int) -> tuple[Array, Array]:
            slot = logits[:, depth : depth + 1]
            if depth == 1:
                behind = continuations(text, view.position, tree.tokens[:, nodes], levels - 1)
            if depth:
                slot = reused(slot, followers(behind, tree, nodes, depth))
            return behind, noise.scores(slot, depth)

        return beam_search(view.pending, self.tree, score, behind, implementation=self.attention)


def continuations(
    text: Int[Array, "B S"], last: Lengths, first: Int[Array, "B w"], levels: int
) -> Int[Array, "B w C levels"]:
    """What followed each of some tokens in a row, at the latest :data:`PLACES`; -1 for nothing.

    Args:
      text: tokens of each row; garbage after ``last[b]``.
      last: position of each row's last token.
      first: the tokens.
      levels: how many tokens that followed.
    """
    earlier = jnp.arange(text.shape[1]) < last[:, None]
    there = (text[:, None] == first[:, :, None]) & earlier[:, None]
    flat = there.reshape(-1, text.shape[1]).astype(jnp.int32)
    places, found = (each.reshape(*first.shape, -1) for each in best_places(flat, PLACES))
    missing = PLACES - places.shape[2]  # In a text of fewer tokens.
    places, found = (jnp.pad(each, ((0, 0), (0, 0), (0, missing))) for each in (places, found))
    at = places[..., None] + 1 + jnp.arange(levels)
    known = (found > 0)[..., None] & (at <= last[:, None, None, None])
    return jnp.where(known, along(jnp.minimum(at, text.shape[1] - 1), text), -1)


def followers(
    behind: Int[Array, "B w1 C levels"], tree: Tree, nodes: slice, depth: int
) -> Int[Array, "B w C"]:
    """Of the tokens that followed a path's first one, those after the path; -1 where another went.

    Args:
      behind: of every node of the first level, as :func:`continuations` has it.
      tree: the one so far.
      nodes: of one level.
      depth: theirs, at least 1.
    """
    index = jnp.broadcast_to(
        jnp.arange(nodes.start, nodes.stop), (len(behind), nodes.stop - nodes.start)
    )
    path = []
    for _ in range(depth - 1):
        path.append(jnp.take_along_axis(tree.tokens, index, axis=1))
        index = jnp.maximum(jnp.take_along_axis(tree.parents, index, axis=1), 1)
    own = along(index - 1, behind)
    same = jnp.ones(own.shape[:3], bool)
    for step, token in enumerate(reversed(path)):
        same &= own[..., step] == token[:, :, None]
    return jnp.where(same, own[..., depth - 1], -1)


def reused(logits: Float[Array, "B 1 V"], following: Int[Array, "B w C"]) -> Float[Array, "B w V"]:
    """Logits of the heads' distribution mixed with that of the tokens that followed, if any."""
    token = jnp.arange(logits.shape[2])
    counts = (following[..., None] == token).sum(axis=2)
    total = counts.sum(axis=2, keepdims=True)
    share = jnp.where(total > 0, REUSED, 0.0)
    seen = jnp.log(share * counts / jnp.maximum(total, 1))
    return jnp.logaddexp(jax.nn.log_softmax(logits) + jnp.log1p(-share), seen)


_PREFIX = "model.medusa_layers."
_HEAD = (
    Rule("input_norm/scale", "D", (("input_layernorm.weight", "D"),)),
    Rule("block_0/kernel", "E D", (("linear.weight", "D E"),)),
    Rule("output_norm/scale", "D", (("post_layernorm.weight", "D"),)),
)


@dataclass(frozen=True)
class TokenSwiftOptions:
    """How much of the cache a draft's forward sees; none changes a token."""

    context: int = BlockBudget.slots
    """Tokens of every row, in whole blocks of 32: the first and the last ones, and those that the
    last queries attend to most."""

    def __post_init__(self) -> None:
        try:
            BlockBudget(self.context)
        except ValueError as error:
            raise ValueError(f"context={self.context}: {error}") from error


@dataclass(frozen=True, eq=False)
class TokenSwiftDraft(Draft):
    """TokenSwift's heads next to their target."""

    config: TokenSwiftConfig
    params: TokenSwiftParams = field(repr=False)
    target: TargetConfig
    context: int = BlockBudget.slots
    """Tokens of every row that a draft's forward sees."""
    name: str = field(default="tokenswift", init=False)

    @property
    def own_params(self) -> Any:
        """The heads."""
        return self.params.heads

    @property
    def default_trees(self) -> DefaultTrees:
        """The published one, three children of every node but the root, and smaller ones."""
        levels = self.config.heads + 1
        tree, chain = TreeConfig((1, 3, 9, 27)[:levels]), TreeConfig((1,) * min(levels, 4))
        narrow = TreeConfig((1, 2, 4, 4)[:levels])
        return DefaultTrees((chain, narrow), (narrow, tree), (tree, narrow, chain), settled=False)

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> TokenSwiftDrafter:
        """The drafter that grows this tree."""
        selector = Quest(self.target, BlockBudget(self.context))
        return TokenSwiftDrafter(self.config, tree, attention, selector)


def load(
    source: str | Path,
    target: Target,
    options: TokenSwiftOptions = TokenSwiftOptions(),
    *,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> TokenSwiftDraft:
    """Load TokenSwift's heads, from the folder of the model that they are stored with.

    Raises:
      FileNotFoundError: if the folder or one of its files is missing.
      ValueError: if they do not belong to the target, or a file is damaged.
    """
    theirs = target.config
    with open_folder(source, mesh, revision) as folder:
        raw, found = folder.raw, folder.tensors
        raw.require(
            ("medusa_heads", "hidden_size", "vocab_size"), "a model with TokenSwift's heads"
        )
        sizes = raw.whole("hidden_size"), raw.whole("vocab_size"), theirs.num_layers
        tensors = {name: found[name] for name in found if name.startswith(_PREFIX)}
        with folder.raw.named():
            config = TokenSwiftConfig(
                *(raw.whole("medusa_heads"), *sizes, theirs.norm_eps, theirs.dtype),
                logits_divisor=theirs.logits_divisor,
                logit_cap=theirs.logit_cap,
            )
            config.check_fits(theirs)
        params = folder.params(heads_table(config), tensors, config.dtype)
    bound = TokenSwiftParams(params, head_of(target.params))
    return TokenSwiftDraft(config, bound, target.config, options.context)


def heads_table(config: TokenSwiftConfig) -> Table:
    """The tensors of the heads."""
    sizes = {"D": config.model_width, "E": config.model_width}
    leaves = [
        bind(rule, sizes, f"heads_{head}/", f"{_PREFIX}{head}.")
        for head in range(config.heads)
        for rule in _HEAD
    ]
    return Table(tuple(leaves), {})
