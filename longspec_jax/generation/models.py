"""The loaded models with the settings of all calls, and what may propose trees in a call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from longspec_jax.checks import Tokenizer
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.decoding.batch_invariant import check_tree, choose_kernels, serves_tree
from longspec_jax.decoding.policy import candidates
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Drafter, NoDraft
from longspec_jax.drafters.draft import DefaultTrees, Draft, is_large
from longspec_jax.drafters.joined import JoinedDraft
from longspec_jax.ops.matmul.quantised_weights import has_unpacked, quantised_matrices

SEVERAL = 4
"""Rows decoded together from which a large target has smaller trees to choose from: 64 nodes of
each are 256 in one pass."""
SPARSE_LEVELS = 4, 3, 5
"""Levels of the chains for a target of experts, the default one first."""


@dataclass(frozen=True, eq=False, repr=False)
class Models:
    """A target, optionally its draft, and how to decode with them."""

    target_config: TargetConfig
    target_params: PyTree
    draft: Draft | Sequence[Draft] | None = None
    """What proposes tokens; several propose into one tree."""
    tokenizer: Tokenizer | None = None
    """A transformers tokenizer; without one, prompts are token ids and there is no text."""
    dequantised: tuple[str, ...] = ()
    """The types of a GGUF file's matrices, dequantised when they are loaded or multiplied with: the
    target is the model of these weights, not the one that was quantised."""
    stop_tokens: tuple[int, ...] = ()
    """What ends a row unless ``eos_token_id`` says otherwise."""
    tree: TreeConfig | None = None
    """The tree of calls that name none; if absent the fastest on this machine, which may be
    none."""
    attention: str | None = None
    """Attention implementation; chosen automatically if absent."""
    prefill_chunk: int = 256
    """Tokens of one prefill step; more is faster on large devices and takes more memory."""
    mesh: Mesh | None = None
    """What the parameters are spread over; one device if absent."""
    max_num_seqs: int | None = None
    """Rows that are decoded at once; all rows if absent. The prompts of a larger batch wait. Each
    is prefilled between the rounds of the others, and takes the next free slot."""
    expected_tokens: int = 0
    """Tokens of the longest row, prompt and new ones, where that is known beforehand. Calls with
    fewer get caches of the same size, and need no programs of their own."""
    offload: bool = False
    """Whether the target's cache lies in the host's memory, for contexts larger than the device's.
    Two of its layers are on the device at a time, and the last one always. A pass takes as long as
    moving the cache (docs/guides/memory.md). One device only."""
    batch_invariant: bool | None = None
    """Whether 16-bit text is to be that of plain decoding, by kernels of one order; where there are
    such kernels, if absent. float32 text is without them."""

    def __repr__(self) -> str:
        """One line: the target's class and size, its precision, and what proposes tokens."""
        config, names = self.target_config, [draft.name for draft in self.drafts]
        size = f"layers {config.num_layers}, width {config.model_width}"
        parts = config.architecture, size, self.precision, f"draft {' and '.join(names) or 'none'}"
        return f"{type(self).__name__}({', '.join(parts)})"

    @cached_property
    def plans(self) -> dict[Any, Any]:
        """The plans of calls so far, by what tells them apart."""
        return {}

    @cached_property
    def candidates(self) -> dict[Any, tuple[tuple[Drafter, ...], Any]]:
        """What :func:`drafters_for` has found for calls so far, by its arguments."""
        return {}

    @cached_property
    def drafts(self) -> tuple[Draft, ...]:
        """All drafts; none for plain decoding."""
        if self.draft is None:
            return ()
        return tuple(self.draft) if isinstance(self.draft, Sequence) else (self.draft,)

    @cached_property
    def proposer(self) -> Draft | None:
        """All drafts as one; None for plain decoding."""
        several = len(self.drafts) > 1
        return JoinedDraft(self.drafts) if several else next(iter(self.drafts), None)

    @cached_property
    def target(self) -> TargetModel:
        """The static part of the target, its kernels chosen."""
        mesh = None if self.mesh is None else self.mesh.abstract_mesh
        target = TargetModel(self.target_config, self.attention, mesh, self.offload)
        quantised = has_unpacked(self.target_params)
        return choose_kernels(target, self.batch_invariant, quantised=quantised)

    @cached_property
    def precision(self) -> str:
        """In what the target is computed, and what its weights and cache are stored in."""
        dtype, matrices = self.target_config.dtype, quantised_matrices(self.target_params)
        types = " and ".join(self.dequantised)
        labels = types or " and ".join(sorted({matrix.label for matrix in matrices}))
        computed = f"weights {labels}, activations {dtype}" if matrices else dtype
        if types and not matrices:
            computed += f", dequantised from {types}"
        cached = self.target_config.kv_dtype
        return computed if cached is None else f"{computed}, cache {cached}"

    @cached_property
    def large(self) -> bool:
        """Whether a GPU spends most of a round on reading the target's weights."""
        return is_large(self.target_params)


def drafters_for(
    models: Models,
    tree: TreeConfig | None,
    rows: int,
    *,
    adaptive: bool,
    choices: Callable[[Sequence[Drafter]], tuple[Drafter, ...]] = candidates,
) -> tuple[tuple[Drafter, ...], Any]:
    """The drafters that a call may run, and their parameters, which they share.

    Args:
      tree: the tree that the call names, if it names one.
      adaptive: whether the run itself chooses, by the clock.
      choices: what it then chooses among, of the drafters.

    Raises:
      ValueError: for a tree without a draft, one that is too large for the same bits, and for a
        choice among nothing.
      NotImplementedError: for more nodes of all rows than have the same bits.
    """
    chosen = models.tree if tree is None else tree
    draft = models.proposer
    if draft is None and tree is None:
        chosen = PLAIN
    if chosen == PLAIN:
        if adaptive:
            raise ValueError(
                "adaptive=True has nothing to choose: this call decodes plainly; load a draft "
                "and leave its tree in place, or drop adaptive"
            )
        return (NoDraft(),), None
    if draft is None:
        raise ValueError(
            f"tree {chosen} needs a draft and none is loaded; pass draft= to from_pretrained, "
            "or tree=PLAIN"
        )
    if chosen is not None and chosen.lookup and not any(each.looks_up for each in models.drafts):
        raise ValueError(
            f"tree {chosen} joins what is looked up, and no draft that looks up is loaded; load "
            f"ngram beside the draft, or leave ~{chosen.lookup} out"
        )
    if chosen is not None and chosen.lookup and all(each.looks_up for each in models.drafts):
        if chosen.widths:
            raise ValueError(
                f"tree {chosen} joins what is looked up to a model's nodes, and only drafts that "
                f"look up are loaded; write none@{chosen.num_nodes}~{chosen.lookup}"
            )
        # The tree is theirs alone, and lookup its levels.
        chosen = replace(chosen.looked_up, budget=chosen.budget)
    together = rows if models.max_num_seqs is None else min(rows, models.max_num_seqs)
    target = models.target
    if chosen is not None:
        check_tree(target, chosen)
        trees = (chosen,)
    else:
        trees = likely_trees(
            draft.default_trees,
            models.large,
            models.mesh,
            rows=together,
            sparse=target.config.is_sparse,
            serves=partial(serves_tree, target),
        )
        if adaptive:  # Its candidates have plain decoding of their own.
            trees = tuple(each for each in trees if each.num_levels)
        elif models.offload:  # Moving the cache takes the same time under every tree.
            trees = trees[:1]
    target.check_rows(together, max((tree.num_nodes for tree in trees), default=1))
    drafters = tuple(draft.drafter(tree, models.attention) for tree in trees)
    return choices(drafters) if adaptive else drafters, draft.params


def likely_trees(
    defaults: DefaultTrees,
    large: bool,
    mesh: Mesh | None,
    *,
    rows: int = 1,
    sparse: bool = False,
    serves: Callable[[TreeConfig], bool] = bool,
) -> tuple[TreeConfig, ...]:
    """What a call without a tree may run: the usual tree first, plain decoding last.

    The first alone where it is settled, and where no clock may choose.

    Args:
      mesh: what its parameters are spread over; None for one device.
      sparse: whether the target has experts. Then its trees are chains of several lengths.
      serves: whether the target's kernels can verify a tree.
    """
    settled = large and defaults.settled
    small = _few(defaults.cpu) if jax.default_backend() == "cpu" else defaults.gpu
    trees = defaults.large if large else small
    if large and rows >= SEVERAL and defaults.together:
        trees, settled = defaults.together, False
    if sparse:
        trees, settled = _chains(trees), False
    trees = tuple(filter(serves, trees))
    return (*trees, PLAIN) if may_choose(mesh) and not settled else trees[:1]


def _few(trees: Sequence[TreeConfig]) -> tuple[TreeConfig, ...]:
    """On a CPU, where a program takes seconds to compile: the first tree, and lookup alone.

    Of trees behind chains, which pay at long contexts, the one on one level too.
    """
    chained = trees[0].chain is not None
    return tuple(
        tree
        for index, tree in enumerate(trees)
        if not index or not tree.widths or (chained and tree.chain is None)
    )


def _chains(trees: Sequence[TreeConfig]) -> tuple[TreeConfig, ...]:
    """For a target of experts: chains no longer than the trees.

    64 nodes choose nearly all experts of a layer, and a plain step reads only those of one token.
    Trees behind a chain stay: they verify the chain in partial forwards.
    """
    if any(tree.chain is not None for tree in trees):
        return tuple(trees)
    levels, lookup = max(len(tree.widths) for tree in trees), trees[0].lookup
    chains = (TreeConfig((1,) * min(each, levels), lookup=lookup) for each in SPARSE_LEVELS)
    return tuple(dict.fromkeys(chains))


def may_choose(mesh: Mesh | None) -> bool:
    """Whether a clock may choose what calls run."""
    # Several processes would choose by their own clocks and run different programs.
    return mesh is None and jax.process_count() == 1
