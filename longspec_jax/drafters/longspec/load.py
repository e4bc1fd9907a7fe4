"""A LongSpec draft: its options, the draft bound to its target, and how it is loaded."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from longspec_jax.config.tree import DEFAULT_TREE, TreeConfig
from longspec_jax.drafters.checkpoints.vocabulary import load_draft_vocabulary
from longspec_jax.drafters.draft import DefaultTrees, Draft, Target, pays_in_int8
from longspec_jax.drafters.longspec.checkpoint import load_draft
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.drafters.longspec.drafter import LongSpecDrafter
from longspec_jax.drafters.longspec.model import LongSpecParams
from longspec_jax.drafters.retrieval.working_cache import WorkingCache, WorkingCacheOptions
from longspec_jax.drafters.vocabulary import check_vocabulary
from longspec_jax.sharding import param_shardings


@dataclass(frozen=True)
class LongSpecOptions(WorkingCacheOptions):
    """Options of a LongSpec draft; all make it cheaper, and none changes a token.

    With a working cache, cross-attention reads chosen chunks of the target's last layer.
    """

    vocabulary: int | None = None
    """How many tokens it may propose: the first ones of the table beside the draft; all if absent.

    ``python -m train.vocabulary`` makes the table. A smaller LM head is faster and misses some."""
    int8: bool | None = None
    """Read its weights and a copy of the target's LM head in 8 bits: half the bytes.

    If absent, on a GPU with a large target in 16 bits, where it pays."""


@dataclass(frozen=True, eq=False)
class LongSpecDraft(Draft):
    """A draft layer and the tables it shares with its target."""

    config: DraftConfig
    params: LongSpecParams
    name: str = "longspec"
    working: WorkingCache | None = None
    """What cross-attention reads of the target's cache; all of it if absent."""

    @classmethod
    def bind(
        cls,
        config: DraftConfig,
        layer: Any,
        target_params: Any,
        *,
        vocabulary: Any = None,
        int8: bool = False,
        working: WorkingCache | None = None,
        mesh: Mesh | None = None,
    ) -> "LongSpecDraft":
        """A draft for a loaded target.

        Args:
          layer: parameters of :class:`~longspec_jax.drafters.longspec.model.LongSpecLayer`.
          target_params: the target's parameters, whose embedding and LM head the draft reads.
          vocabulary: ids of the tokens that it may propose, ``[v]``; all if absent.
          int8: read the layer and a copy of the LM head in 8 bits.
          working: what cross-attention reads of the target's cache; all of it if absent.
          mesh: what the parameters are spread over; one device if absent.
        """
        params = LongSpecParams.beside(target_params, layer)
        if vocabulary is not None:
            tokens = check_vocabulary(vocabulary, params.embedding.shape[0])
            params = params.restricted(jnp.asarray(tokens))
        if int8:
            params = params.in_int8(mesh)
        elif mesh is not None and vocabulary is not None:
            head = jax.device_put(params.head, param_shardings(mesh, {"head": params.head})["head"])
            params = replace(params, head=head)
        return cls(config, params, working=working)

    @property
    def default_trees(self) -> DefaultTrees:
        """Chains and small trees where nodes cost time; the paper's where they are nearly free.

        The more rows decode together, the fewer of its nodes pay.
        """
        small = TreeConfig((1, 1, 1)), TreeConfig((1, 1)), TreeConfig((2, 2))
        fewer = (replace(DEFAULT_TREE, budget=nodes) for nodes in (32, 16))
        return DefaultTrees(
            small,
            (TreeConfig((4, 4, 4)), DEFAULT_TREE),
            (DEFAULT_TREE,),
            together=(DEFAULT_TREE, *fewer),
        )

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> LongSpecDrafter:
        """The drafter that grows this tree."""
        return LongSpecDrafter(self.config, tree, attention, self.working)


def load(
    source: str | Path,
    target: Target,
    options: LongSpecOptions,
    *,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> LongSpecDraft:
    """Load a draft in the format of the LongSpec release, from a folder or a hub id.

    Raises:
      FileNotFoundError: if the draft, one of its files or its table of tokens is missing.
      ValueError: if it does not belong to the target, or a file is damaged.
    """
    vocabulary = None
    if options.vocabulary is not None:
        limits = target.config.vocab_size, options.vocabulary
        vocabulary = load_draft_vocabulary(source, *limits, revision=revision)
    config, layer = load_draft(
        source, target.config, dtype=target.config.dtype, mesh=mesh, revision=revision
    )
    return LongSpecDraft.bind(
        config,
        layer,
        target.params,
        vocabulary=vocabulary,
        int8=pays_in_int8(target) if options.int8 is None else options.int8,
        working=options.working_cache(target.config),
        mesh=mesh,
    )
