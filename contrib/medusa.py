"""Medusa (arXiv 2401.10774): a head for every token further on, and the tree of their best tokens.

    python -m infer.decode --target=FOLDER --draft=contrib.medusa:FOLDER

All heads read the target's hidden state of the last committed token, after the final norm. The
target's own LM head makes the pending token of it; head ``j`` guesses the token ``j + 1`` places
after that one. So a round costs no attention and no level-by-level forwards, and a row keeps one
hidden state. Heads do not know of each other's tokens: all nodes of a level have the same
continuations, and the tree is the one of the best sums of log-probabilities (arXiv 2401.10774,
section 2.1.2 and appendix C choose a fixed tree instead).

The authors' ``medusa_lm_head.safetensors`` or ``.pt`` has the tensors of all heads, by the number
of the head and of the module in it: residual blocks, and after them an LM head of its own where it
has one. ``config.json`` has no sizes; they follow from the tensors.

vLLM's ``model.safetensors`` has the same under other names, usually without biases, and maybe
``token_map``: the tokens that its LM heads know.
"""

import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Float, Int

from longspec_jax.axes import Array, Leaf
from longspec_jax.checks import whole_number
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import MAX_TREE_LEVELS, TreeConfig
from longspec_jax.drafters.base import Committed, Drafter, Needs, Params, SamplingNoise, View
from longspec_jax.drafters.draft import DefaultTrees, Draft, Target
from longspec_jax.drafters.registry import Kind
from longspec_jax.drafters.tables import NOT_WHOLE, check_sizes
from longspec_jax.drafters.tree import Tree, beam_search, root_tree
from longspec_jax.drafters.vocabulary import check_vocabulary
from longspec_jax.models.target import head_logits, head_of, target_logits
from longspec_jax.ops.matmul.few_rows import matmul
from longspec_jax.ops.slicing import last_along
from longspec_jax.weights.checkpoint import (
    MEDUSA_FILES,
    WEIGHT_FILES,
    Tensor,
    Tensors,
    open_tensors,
)
from longspec_jax.weights.hub import local_folder
from longspec_jax.weights.json_files import JsonObject, read_json
from longspec_jax.weights.params import load_params
from longspec_jax.weights.tables import Rule, Table, bind, check_tensors

KIND = Kind("contrib.medusa:MedusaOptions", "contrib.medusa:load", package="")

MOST_BLOCKS = 16
"""Of a head."""


@dataclass(frozen=True)
class MedusaConfig:
    """Shape of the heads."""

    heads: int
    blocks: int
    """Residual blocks of every head."""
    model_width: int
    """Of the target, as all that follows."""
    vocab_size: int
    layers: int
    own_tables: bool
    """Whether every head has an LM head of its own; the target's serves all if not."""
    dtype: str = "bfloat16"
    bias: bool = True
    """Whether the blocks have biases."""
    proposable: int | None = None
    """Tokens that the LM heads know; all if absent."""
    logits_divisor: float = 1.0
    """Of the logits by the target's LM head, as in the target."""
    logit_cap: float | None = None
    """Likewise."""

    def __post_init__(self) -> None:
        whole_number("medusa_num_heads", self.heads, 1, MAX_TREE_LEVELS)
        whole_number("medusa_num_layers", self.blocks, 1, MOST_BLOCKS)

    def check_fits(self, target: TargetConfig) -> None:
        """Raise ValueError unless the heads can read the target's hidden states."""
        check_sizes(self.model_width, self.vocab_size, target)


@struct.dataclass
class MedusaParams:
    """The heads, and the target's LM head."""

    heads: Any
    """By ``heads_0`` ...: the blocks, and maybe an LM head."""
    table: Leaf[Float[Array, "v D"]]
    """The target's LM head, or some of its rows."""
    vocabulary: Leaf[Int[Array, " v"]] | None = None
    """The target's tokens that the rows of the LM heads stand for; token ``i`` is the i-th if
    absent."""

    def logits(
        self, config: MedusaConfig, hidden: Float[Array, "B D"], levels: int
    ) -> Float[Array, "B n v"]:
        """What the first ``levels`` heads make of a hidden state, float32."""
        states, logits = [], []
        for index in range(levels):
            head, state = self.heads[f"heads_{index}"], hidden
            for block in range(config.blocks):
                weights = head[f"block_{block}"]
                state = state + jax.nn.silu(matmul(state, weights["kernel"], weights.get("bias")))
            states.append(state)
            if config.own_tables:
                logits.append(head_logits(head["head"], state))
        if config.own_tables:
            return jnp.stack(logits, axis=1)
        products = head_logits(self.table, jnp.stack(states, axis=1))
        return target_logits(products, config.logits_divisor, config.logit_cap)


@dataclass(frozen=True)
class MedusaDrafter(Drafter):
    """Proposes the tree of the heads' best tokens by cumulative log-probability."""

    config: MedusaConfig
    tree: TreeConfig = TreeConfig()
    attention: str | None = None
    """Implementation of the choice among a level's continuations; chosen automatically if
    absent."""
    name: str = field(default="medusa", init=False)

    def __post_init__(self) -> None:
        if self.tree.num_levels > self.config.heads:
            raise ValueError(
                f"tree {self.tree} has {self.tree.num_levels} levels, and the draft has "
                f"{self.config.heads} Medusa heads, one for a level; name a tree of fewer levels"
            )

    @cached_property
    def needs(self) -> Needs:
        """The last hidden state, after the target's final norm."""
        return Needs(hidden=(self.config.layers,), recent=1)

    def begin(self, params: Params, batch: int, capacity: int) -> Array:
        """No token yet."""
        return jnp.zeros((batch, self.config.model_width), jnp.dtype(self.config.dtype))

    def extend(self, params: Params, state: Array, committed: Committed) -> Array:
        """Keep the hidden state of the last token."""
        hidden = committed.features.hidden[self.config.layers]
        last = last_along(hidden, committed.count).astype(state.dtype)
        return jnp.where((committed.count > 0)[:, None], last, state)

    def propose(self, params: Params, state: Array, view: View, noise: SamplingNoise) -> Tree:
        """Run the heads, and grow the tree over what they say."""
        levels, draft = self.tree.num_levels, params.draft
        if not levels:
            return root_tree(view.pending, self.tree)
        logits = draft.logits(self.config, state, levels)
        if draft.vocabulary is not None:
            noise = noise.among(draft.vocabulary)

        def score(
            memory: tuple[()], tree: Tree, nodes: slice, depth: int
        ) -> tuple[tuple[()], Array]:
            # All nodes of a level have the same continuations.
            found = noise.scores(logits[:, depth : depth + 1], depth)
            shape = (found.shape[0], nodes.stop - nodes.start, found.shape[2])
            return memory, jnp.broadcast_to(found, shape)

        return beam_search(
            view.pending, self.tree, score, (), draft.vocabulary, implementation=self.attention
        )


_PREFIXES = "medusa_heads.", "medusa_head."
"""May stand before all names, where the heads were saved with their model."""
TOKEN_MAP = "token_map"


@dataclass(frozen=True)
class MedusaDialect:
    """How Medusa heads are stored."""

    block: str
    """Name of a linear map, by ``head`` and ``block``."""
    table: str
    """Name of a head's own LM head, by ``head`` and the number of its ``blocks``."""
    files: tuple[str, ...]
    """What the weights may be called."""
    heads_key: str
    """The key of the number of heads."""
    blocks_key: str
    """The key of the number of blocks of each."""

    def heads_table(self, config: MedusaConfig) -> Table:
        """The tensors of the heads."""
        rows = config.proposable or config.vocab_size
        sizes = {"D": config.model_width, "E": config.model_width, "V": rows}
        leaves = []
        for head in range(config.heads):
            for block in range(config.blocks):
                ours = f"heads_{head}/block_{block}/"
                theirs = self.block.format(head=head, block=block)
                rule = Rule("kernel", "E D", (("weight", "D E"),))
                leaves.append(bind(rule, sizes, ours, theirs))
                if config.bias:
                    leaves.append(bind(Rule("bias", "D", (("bias", "D"),)), sizes, ours, theirs))
            if config.own_tables:
                rule = Rule("head", "V D", (("weight", "V D"),))
                theirs = self.table.format(head=head, blocks=config.blocks)
                leaves.append(bind(rule, sizes, f"heads_{head}/", theirs))
        return Table(tuple(leaves), {})


AUTHORS = MedusaDialect(
    *("{head}.{block}.linear.", "{head}.{blocks}.", MEDUSA_FILES),
    *("medusa_num_heads", "medusa_num_layers"),
)
VLLM = MedusaDialect(
    *("blocks.{head}.layers.{block}.", "lm_heads.{head}.", WEIGHT_FILES),
    *("num_heads", "num_hidden_layers"),
)


@dataclass(frozen=True)
class MedusaOptions:
    """Medusa heads have no options."""


@dataclass(frozen=True, eq=False)
class MedusaDraft(Draft):
    """Medusa heads next to their target."""

    config: MedusaConfig
    params: MedusaParams
    name: str = field(default="medusa", init=False)

    @property
    def own_params(self) -> Any:
        """The heads."""
        return self.params.heads

    @property
    def default_trees(self) -> DefaultTrees:
        """Trees as deep as there are heads, up to four: a deeper level is seldom right."""
        levels = min(self.config.heads, 4)
        chain, small = TreeConfig((1,) * min(levels, 3)), TreeConfig((2, 2)[:levels])
        narrow, wide = (TreeConfig((8, 16, 16, 16)[:levels], budget) for budget in (16, 64))
        return DefaultTrees(
            (chain, small), (narrow, wide), (wide, narrow), settled=False, together=(wide, narrow)
        )

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> MedusaDrafter:
        """The drafter that grows this tree."""
        return MedusaDrafter(self.config, tree, attention)


def load(
    source: str | Path,
    target: Target,
    options: MedusaOptions = MedusaOptions(),
    *,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> MedusaDraft:
    """Load Medusa heads, of Medusa 1 or 2, as the authors or vLLM store them.

    Raises:
      FileNotFoundError: if the folder or one of its files is missing.
      ValueError: if they do not belong to the target, or a file is damaged.
    """
    folder = local_folder(source, revision)
    raw = read_json(folder / "config.json")
    dialect = VLLM if raw.text("model_type", "") == "medusa" else AUTHORS
    with ExitStack() as stack:
        tensors = _renamed(open_tensors(folder, stack, dialect.files))
        known = tensors.pop(TOKEN_MAP, None)
        try:
            config = _config(raw, tensors, dialect, target.config, known)
            config.check_fits(target.config)
            tokens = None if known is None else _tokens(known, config)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error
        table = dialect.heads_table(config)
        check_tensors(table, tensors, str(source))
        heads = load_params(table, tensors, config.dtype, mesh)
    head = head_of(target.params)
    if tokens is not None:
        head = jnp.take(head, tokens, axis=0)
    return MedusaDraft(config, MedusaParams(heads, head, tokens))


def _renamed(tensors: Tensors) -> Tensors:
    """The tensors without what may stand before their names."""
    for prefix in _PREFIXES:
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def _tokens(known: Tensor, config: MedusaConfig) -> jax.Array:
    """The tokens that the LM heads know."""
    if len(known.shape) != 1:
        raise ValueError(f"{TOKEN_MAP} {known.shape} must be a list; {NOT_WHOLE}")
    return jnp.asarray(check_vocabulary(known.read((slice(None),)), config.vocab_size))


def _config(
    raw: JsonObject,
    tensors: Tensors,
    dialect: MedusaDialect,
    target: TargetConfig,
    known: Tensor | None,
) -> MedusaConfig:
    """The shape of the heads, by their tensors."""
    blocks = raw.whole(dialect.blocks_key, 1)
    pattern = re.escape(dialect.block).replace(r"\{head\}", r"(\d{1,4})").split(r"\{block")[0]
    stored = {int(found[1]) for name in tensors if (found := re.match(pattern, name))}
    first = tensors.get(f"{dialect.block.format(head=0, block=0)}weight")
    own = tensors.get(f"{dialect.table.format(head=0, blocks=blocks)}weight")
    if first is None or len(first.shape) != 2 or (own is not None and len(own.shape) != 2):
        raise ValueError(
            f"{dialect.block.format(head=0, block=0)}weight, the first block of the first head, is "
            "not among the tensors, or they are no matrices; these are no Medusa heads, or the "
            "file is damaged"
        )
    if raw.number("logit_scale", 1.0) != 1:
        raise raw.error("logit_scale", "is not supported, only 1", "load other heads")
    shared = dialect is VLLM and raw.flag("original_lm_head", False)
    if shared and own is not None:  # vLLM stores the target's LM head with them.
        del tensors[f"{VLLM.table.format(head=0)}weight"]
        own = None
    rows = target.vocab_size if own is None else own.shape[0]
    # The released files may hold more heads than their config.json names.
    heads = max(raw.whole(dialect.heads_key, len(stored)), len(stored))
    return MedusaConfig(
        heads,
        blocks,
        first.shape[0],
        rows if known is None else raw.whole("vocab_size", rows),
        target.num_layers,
        own is not None,
        target.dtype,
        bias=f"{dialect.block.format(head=0, block=0)}bias" in tensors,
        proposable=None if known is None else known.shape[0],
        logits_divisor=target.logits_divisor,
        logit_cap=target.logit_cap,
    )
