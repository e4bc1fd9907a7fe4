"""The loaded models with the settings of all calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax.sharding import Mesh
from jaxtyping import PyTree

from longspec_jax.checks import Tokenizer
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.batch_invariant import choose_kernels
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Drafter
from longspec_jax.drafters.draft import Draft, is_large
from longspec_jax.drafters.joined import JoinedDraft
from longspec_jax.ops.matmul.quantised_weights import has_unpacked, quantised_matrices


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
    def candidates(self) -> dict[Any, tuple[tuple[Drafter, ...], Any, int]]:
        """What ``drafters_for`` has found for calls so far, by its arguments, and most levels."""
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
