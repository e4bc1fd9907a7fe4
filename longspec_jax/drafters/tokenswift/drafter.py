"""The TokenSwift drafter: one forward of the target over a part of its cache, and heads behind it.

The forward runs the pending token and yields the target's own logits of the next one. Each head
adds one linear map to the stream of the head before, the first to what leaves the target's last
layer, and the target's LM head makes logits of it behind a norm (arXiv 2502.18890, section 3). So a
tree has a level for the forward and one for each head, and its first level is as good as the part
of the cache is.

The paper chooses that part by the keys that a last query attends to, anew when as many tokens have
been emitted. Here it is chosen in every round. The reuse of n-grams as further branches is left
out.
"""

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Float

from longspec_jax.axes import Array, Leaf
from longspec_jax.checks import whole_number
from longspec_jax.config import MAX_TREE_LEVELS, TargetConfig, TreeConfig
from longspec_jax.drafters.base import Committed, Drafter, Needs, Params, SamplingNoise, View
from longspec_jax.drafters.retrieval.selection import Selector, SinksAndRecent
from longspec_jax.drafters.tables import check_sizes
from longspec_jax.drafters.tree import Tree, plant, tree_of_levels
from longspec_jax.models.target import head_logits, target_logits
from longspec_jax.ops.layer import rms_norm
from longspec_jax.ops.matmul.few_rows import matmul


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
        return target_logits(config, head_logits(self.table, jnp.stack(states, axis=1)))


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

    @property
    def needs(self) -> Needs:
        """What the selector needs."""
        return self.selector.needs

    def begin(self, params: Params, batch: int, capacity: int) -> Any:
        """The selector's state."""
        return self.selector.begin(batch, capacity)

    def extend(self, params: Params, state: Any, committed: Committed) -> Any:
        """Let the selector learn of committed tokens."""
        return self.selector.extend(state, committed)

    def gathered_slots(self, capacity: int) -> int:
        """Those that the selector copies."""
        return self.selector.gathered_slots(capacity)

    def propose(self, params: Params, state: Any, view: View, noise: SamplingNoise) -> Tree:
        """Run the pending token and the heads, and grow the tree over what they say."""
        levels, draft, last = self.tree.num_levels, params.draft, self.config.layers - 1
        if not levels:
            return plant(view.pending, self.tree)
        run = view.partial_forward(
            view.pending[:, None],
            view.position[:, None],
            self.selector.choose(state, view),
            view.uncommitted(1),
            jnp.ones((len(view.pending), 1, 1), bool),
            0,
            Needs(hidden=(last,)),
        )
        logits = run.logits
        if levels > 1:
            behind = draft.logits(self.config, run.features.hidden[last][:, 0], levels - 1)
            logits = jnp.concatenate([logits, behind], axis=1)

        def scores(depth: int) -> Array:
            return noise.scores(logits[:, depth : depth + 1], depth)

        return tree_of_levels(view.pending, self.tree, scores, self.attention)
