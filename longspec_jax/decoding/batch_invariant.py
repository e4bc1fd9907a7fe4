"""Whether text is the same with and without speculation: the one place that knows.

In float32 it is: rounding is so fine that no draw of any test has hung on it. In 16 bits a token's
logits must have the same bits in every pass over it: alone, with other rows, as a node of a tree,
and whether the tokens before it are cached or in the tree. That takes kernels whose sums have one
order, which depends neither on the rows alongside a row nor on the size of the cache. Prompts are
then prefilled one by one, in steps that follow from their own length
(:func:`longspec_jax.decoding.runner.chunk_sizes`).
"""

import dataclasses
import functools
import warnings

import jax.numpy as jnp

from longspec_jax.config.layers import ExpertsConfig, LayerConfig
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.target import TargetModel
from longspec_jax.ops import hardware
from longspec_jax.ops.attention import path
from longspec_jax.ops.matmul import ordered_tiles
from longspec_jax.ops.recurrence.recurrence import refuse_wide_keys


def is_identical(target: TargetModel) -> bool:
    """Whether text is promised to be the same, token for token, with and without speculation.

    That includes every drafter that is lossless, every tree, and every number of rows and slots.

    Args:
      target: the static part of the target, on the device of this process.
    """
    return target.config.dtype == "float32" or target.batch_invariant


def choose_kernels(
    target: TargetModel, wanted: bool | None, *, quantised: bool = False
) -> TargetModel:
    """The target with the kernels of one order, or without.

    Warns once where this GPU, or this jax, lacks kernels.

    Args:
      target: the static part of the target, on the device of this process.
      wanted: whether to take them; None takes them where they serve a target in 16 bits and such
        text was compared on a GPU: on Hopper, without soft caps in attention, and over a mesh
        without windows, sinks and heads of 256 numbers.
      quantised: whether some of its weights are, which no kernel multiplies in one order.

    Raises:
      NotImplementedError: if they are wanted and there are none; says why.
    """
    warn_of_missing_kernels()
    if wanted is False or target.config.dtype == "float32":
        return target
    try:
        compared = _require_kernels(target, quantised)
    except NotImplementedError:
        if wanted:
            raise
        return target
    return dataclasses.replace(target, batch_invariant=bool(wanted or compared))


@functools.cache
def warn_of_missing_kernels() -> None:
    """Warn once a process of what its GPU computes slowly for want of kernels."""
    if missing := hardware.missing_kernels():
        warnings.warn(missing, stacklevel=3)


def serves_tree(target: TargetModel, tree: TreeConfig) -> bool:
    """Whether the target's kernels can verify the tree."""
    return not target.batch_invariant or path.serves_tree(tree.num_nodes, tree.num_levels)


def check_tree(target: TargetModel, tree: TreeConfig) -> None:
    """Refuse a tree that the target's kernels cannot verify.

    Raises:
      ValueError: names the tree and the remedy.
    """
    if not serves_tree(target, tree):
        raise ValueError(
            f"tree {tree} has {tree.num_nodes} nodes and {tree.num_levels} levels; the kernels of "
            f"batch_invariant verify up to {path.MOST_NODES} and {path.RECENT}: take a smaller "
            "tree, or batch_invariant=False"
        )


def _require_kernels(target: TargetModel, quantised: bool) -> bool:
    """Whether text of the kernels was compared on a GPU; raise for what none serves."""
    config = target.config
    if quantised:
        raise NotImplementedError(
            "batch_invariant needs weights in 16 bits, or quantised ones that the Hopper kernel "
            "reads; leave it out"
        )
    if target.offload or target.attention is not None:
        raise NotImplementedError(
            "batch_invariant needs the cache on the device and the automatic attention; leave out "
            "offload and attention"
        )
    kinds = config.kinds or (LayerConfig(),)
    parallel = any(kind.experts is not None and kind.experts.parallel_mlp for kind in kinds)
    if config.layer_inputs is not None or config.value_norm or parallel:
        raise NotImplementedError(
            "batch_invariant was not made for a second embedding, norms of values, or experts "
            "next to an MLP; leave it out, or load the target in float32"
        )
    narrow = config.kv_dtype is not None
    hopper = _require_attention_kernels(config)
    if not hopper and (narrow or config.is_sparse or config.recurrent_layers):
        raise NotImplementedError(
            "batch_invariant has kernels for experts, for recurrent layers and for a cache in 8 "
            "bits only on Hopper GPUs; leave it or kv_dtype out"
        )
    if target.mesh is not None and config.out_bias:
        raise NotImplementedError(
            "batch_invariant has no kernel for a bias after attention on a mesh; leave out mesh "
            "or batch_invariant"
        )
    _require_recurrent_kernels(target)
    for kind in kinds:
        _require_mlp_kernels(config, kind.experts, target.width_shares)
    ordered_tiles.refuse_uneven(config.model_width)
    bounded = config.attention_cap is not None or any(kind.window for kind in kinds)
    if not hardware.triton_is_supported() and (
        narrow or bounded or config.head_width > 128 or config.recurrent_layers
    ):
        raise NotImplementedError(
            "batch_invariant has only Triton kernels for recurrent layers, and for prompts of "
            "targets with windows, soft caps, a cache in 8 bits or heads of 256 numbers, and this "
            "jax lacks them"
        )
    alone = bounded or config.attention_sinks or config.head_width > 128
    compared = config.attention_cap is None and (target.mesh is None or not alone)
    return hopper and compared


def _require_attention_kernels(config: TargetConfig) -> bool:
    """Whether those of one order are Hopper's; raise for layers without one."""
    hopper, narrow = False, config.kv_dtype is not None
    for kind in config.kinds or (LayerConfig(),):
        heads = config.heads(kind)
        groups, dtype = config.num_heads // heads.num_kv_heads, jnp.dtype(config.dtype)
        hopper = path.require_target(groups, heads.head_width, dtype, narrow=narrow)
        path.require_window(kind.window)
    return hopper


def _require_recurrent_kernels(target: TargetModel) -> None:
    """Raise for recurrent layers without kernels of one order."""
    width, kinds = target.config.model_width, {*target.config.recurrent_layers.values()}
    if not kinds:
        return
    if target.mesh is not None or len(kinds) > 1:
        raise NotImplementedError(
            "batch_invariant has kernels for recurrent layers of one shape, on one device; leave "
            "out mesh or batch_invariant"
        )
    [sizes] = kinds
    refuse_wide_keys(sizes.key_width)
    gates = sizes.shared * sizes.value_width
    for columns in (sizes.inputs_width + gates, 2 * sizes.shared):
        ordered_tiles.matmul_tile(width, sizes.key_heads * columns)
    ordered_tiles.matmul_tile(sizes.value_heads * sizes.value_width, width, split=True)


def _require_mlp_kernels(config: TargetConfig, experts: ExpertsConfig | None, shares: int) -> None:
    """Raise for layers whose MLPs have no kernels of one order."""
    if experts is None:
        ordered_tiles.matmul_tile(config.model_width, config.mlp_width // shares, gated=True)
        return
    if experts.shared is not None or not experts.renormalised:
        raise NotImplementedError(
            "batch_invariant has no kernel for a shared expert, nor for experts whose weights do "
            "not add up to 1; leave it out, or load the target in float32"
        )
    ordered_tiles.refuse_uneven(config.model_width, experts.width)
    ordered_tiles.refuse_uneven_head(config.model_width, experts.count)
