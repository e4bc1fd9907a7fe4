"""The Medusa drafter: a head for every token further on, and the tree of their best tokens.

All heads read the target's hidden state of the last committed token, behind the final norm. The
target's own LM head makes the pending token of it; head ``j`` guesses the token ``j + 1`` places
behind that one. So a round costs no attention and no level-by-level forwards, and a row keeps one
hidden state. Heads do not know of each other's tokens: all nodes of a level have the same
continuations, and the tree is the one of the best sums of log-probabilities (arXiv 2401.10774,
section 2.1.2 and appendix C choose a fixed tree instead).
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int

from longspec_jax.axes import Array, Leaf
from longspec_jax.checks import whole_number
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import MAX_TREE_LEVELS, TreeConfig
from longspec_jax.drafters.base import Committed, Drafter, Needs, Params, SamplingNoise, View
from longspec_jax.drafters.tables import check_sizes
from longspec_jax.drafters.tree import Tree, plant, tree_of_levels
from longspec_jax.models.target import head_logits, target_logits
from longspec_jax.ops.matmul.few_rows import matmul
from longspec_jax.ops.slicing import last_along

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
    """Of the logits by the target's LM head, as of the target."""
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

    @property
    def needs(self) -> Needs:
        """The last hidden state, behind the target's final norm."""
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
            return plant(view.pending, self.tree)
        logits = draft.logits(self.config, state, levels)
        if draft.vocabulary is not None:
            noise = noise.among(draft.vocabulary)

        def scores(depth: int) -> Array:
            return noise.scores(logits[:, depth : depth + 1], depth)

        return tree_of_levels(
            view.pending, self.tree, scores, draft.vocabulary, implementation=self.attention
        )
