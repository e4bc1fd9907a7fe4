"""Targets with windows, attention sinks and soft caps: a node's logits are those of plain steps.

A CPU multiplies one row otherwise than many, so matmuls are computed row by row here, and attention
node by node. That this has one order is plain, and it shows whether a round gives the kernels what
they are meant to see. That the kernels have one is tested next to them (``tests/ops/attention``).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.layers import LayerConfig, Rotary
from longspec_jax.decoding import target as rounds_lib
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.target import TargetModel, Verification
from longspec_jax.models import layers as layers_lib
from longspec_jax.models import target as target_lib
from longspec_jax.ops.attention import path, reference
from longspec_jax.ops.attention.operands import Fresh, Prefix
from tests.kit import ancestors, random_target, tiny_target_config

WINDOW, CAPACITY, PROMPT, NODES, LEVELS = 40, 1024, 5, 8, 4
SIZES: dict[str, Any] = dict(
    dtype="bfloat16",
    num_heads=2,
    num_kv_heads=1,
    head_width=64,
    model_width=64,
    mlp_width=64,
    vocab_size=64,
    pattern=(0, 1),
)
WINDOWS = LayerConfig(Rotary(1e6), WINDOW), LayerConfig(Rotary())
GEMMA: dict[str, Any] = dict(offset_norms=True, post_norms=True, gelu=True, embedding_factor=8.0)
TARGETS: dict[str, dict[str, Any]] = {
    "Gemma 3": dict(kinds=WINDOWS, qk_norm=True, **GEMMA),
    "OLMo 3": dict(kinds=WINDOWS, pre_norms=False, post_norms=True, wide_qk_norm=True),
    "gpt-oss, but for experts": dict(
        kinds=WINDOWS, attention_sinks=True, qkv_bias=True, out_bias=True
    ),
    "Gemma 2": dict(kinds=WINDOWS, attention_cap=5.0, logit_cap=30.0, **GEMMA),
}


def by_rows(op: Callable[..., Any], *rows: jax.Array, axis: int = 0) -> Any:
    """What the op yields of every token by itself; results have their tokens at this axis.

    Of few tokens there are some more, so that a compiler keeps the loop.
    """
    count, before = rows[0].size // rows[0].shape[-1], rows[0].shape[:-1]
    alone = (each.reshape(count, 1, 1, -1) for each in rows)
    padded = tuple(jnp.pad(each, ((0, -count % NODES), *[(0, 0)] * 3)) for each in alone)

    def together(each: jax.Array) -> jax.Array:
        each = jnp.moveaxis(each[:count], 0, axis)
        return each.reshape(*each.shape[:axis], *before, *each.shape[axis + 3 :])

    return jax.tree.map(together, jax.lax.map(lambda row: op(*row), padded))


def compute_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have matmuls and attention of one order computed so."""
    monkeypatch.setattr(rounds_lib, "path_attention", attend_node_by_node)
    multiply, unembed = layers_lib.ordered_matmul, target_lib.head_matmul
    monkeypatch.setattr(
        layers_lib,
        "ordered_matmul",
        lambda x, *rest: by_rows(lambda row: multiply(row, *rest), x, axis=int(rest[-1])),
    )
    monkeypatch.setattr(
        target_lib, "head_matmul", lambda x, table: by_rows(lambda row: unembed(row, table), x)
    )


def attend_node_by_node(
    q: jax.Array,
    prefix: Prefix,
    fresh: Fresh,
    depth: jax.Array,
    sinks: jax.Array | None = None,
    *,
    levels: int,
    window: int | None = None,
    **scores: float | None,
) -> jax.Array:
    """Path attention, of every node to its last tokens in the order of their positions."""
    batch, tokens = depth.shape
    slots = prefix.keys.shape[2]
    wanted = depth[:, :, None] - jnp.arange(window or slots)[::-1]
    position = prefix.length[:, None, None] + wanted
    on_path = fresh.mask[:, :, None] & (depth[:, None, None] == wanted[:, :, :, None])
    node, row = jnp.argmax(on_path, axis=3), jnp.arange(batch)[:, None, None]
    seen = (position >= 0) & ((wanted < 0) | on_path.any(axis=3))

    def gathered(cached: jax.Array, in_tree: jax.Array) -> jax.Array:
        old = cached[row, :, position % slots]
        return jnp.where((wanted < 0)[..., None, None], old, in_tree[row, node])

    def one(node: tuple[jax.Array, ...]) -> jax.Array:
        q, keys, values, seen = (each[None] for each in node)
        nothing = jnp.zeros((1, keys.shape[2], 1, keys.shape[3]), keys.dtype)
        empty = Prefix(nothing, nothing, jnp.zeros(1, jnp.int32))
        alone = Fresh(keys, values, seen[:, None])
        return reference.speculative_attention(q[:, None], empty, alone, sinks, **scores)[0, 0]

    keys, values = gathered(prefix.keys, fresh.keys), gathered(prefix.values, fresh.values)
    rows = tuple(each.reshape(-1, *each.shape[2:]) for each in (q, keys, values, seen))
    more = -len(rows[0]) % NODES
    rows = tuple(jnp.concatenate([each, *[each[:1]] * more]) for each in rows)
    return jax.lax.map(one, rows)[: batch * tokens].reshape(q.shape)


def grown(rng: np.random.Generator, text: np.ndarray, length: int) -> tuple[Any, ...]:
    """A random tree with the text along one path: tokens, depths, mask, and the path's nodes."""
    parents, depth = [-1], [0]
    for node in range(1, NODES):
        parents.append(int(rng.choice([n for n in range(node) if depth[n] < LEVELS])))
        depth.append(depth[parents[-1]] + 1)
    mask = ancestors(parents)
    along = [node for node in range(NODES) if mask[int(np.argmax(depth)), node]]
    tokens = rng.integers(0, SIZES["vocab_size"], NODES)
    tokens[along] = text[length : length + len(along)]
    return tokens, np.asarray(depth), np.asarray(mask), along


class Stepper:
    """A target's passes over one row or two, compiled once."""

    def __init__(self, name: str) -> None:
        self.target = TargetModel(
            tiny_target_config(**SIZES, **TARGETS[name]), batch_invariant=True
        )
        params = random_target(self.target.config, scale=2.0)
        self.params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        self.prefill = jax.jit(self.target.prefill_chunk)
        self.verify = jax.jit(self.target.verify, static_argnames="levels")
        self.commit = jax.jit(KVCache.commit)

    def begin(self, texts: np.ndarray) -> KVCache:
        """The caches of these texts' first tokens."""
        rows, start = len(texts), jnp.zeros(len(texts), jnp.int32)
        cache = self.target.allocate(rows, CAPACITY)
        prompt, last = jnp.asarray(texts[:, :PROMPT]), start + PROMPT - 1
        return self.prefill(self.params, cache, prompt, start, last).cache

    def nodes(self, cache: KVCache, trees: list[Any], lengths: list[int]) -> Verification:
        """One pass over a tree of every row, each after its own number of tokens."""
        tokens, depth, mask = (
            jnp.asarray(np.stack([np.asarray(tree[at]) for tree in trees])) for at in range(3)
        )
        length = jnp.asarray(lengths, jnp.int32)
        positions = length[:, None] + depth
        levels = LEVELS if tokens.shape[1] > 1 else 0
        operands = tokens.astype(jnp.int32), positions.astype(jnp.int32), mask, length
        return self.verify(self.params, cache, *operands, levels=levels)

    def kept(self, cache: KVCache, found: Verification, paths: Any, lengths: list[int]) -> KVCache:
        """The caches with the K/V of these nodes."""
        at = jnp.asarray(lengths, jnp.int32)
        return self.commit(cache, found.keys, found.values, jnp.asarray(paths, jnp.int32), at)


def compare(name: str, tokens: int, seed: int = 0) -> int:
    """Compare every bit of a text's logits: of plain steps, and of trees next to another text.

    Returns how many tokens were compared, some of them in several trees.
    """
    steps, rng = Stepper(name), np.random.default_rng(seed)
    texts = rng.integers(0, SIZES["vocab_size"], (2, tokens + 2 * LEVELS)).astype(np.int32)
    plain, cache = {}, steps.begin(texts[:1])
    for length in range(PROMPT, tokens):
        one = texts[0, length : length + 1], np.zeros(1, int), np.ones((1, 1), bool)
        found = steps.nodes(cache, [one], [length])
        plain[length] = np.asarray(found.logits)[0, 0]
        cache = steps.kept(cache, found, [[0]], [length])
    assert all(np.isfinite(each).all() for each in plain.values())
    assert (plain[PROMPT] != plain[PROMPT + 1]).any()
    cache, lengths, compared = steps.begin(texts), [PROMPT, PROMPT], 0
    while lengths[0] + LEVELS < tokens:
        trees = [grown(rng, text, at) for text, at in zip(texts, lengths, strict=True)]
        found = steps.nodes(cache, trees, lengths)
        room = int(path.reach(jnp.asarray(lengths[:1]))[0]) - lengths[0]
        along = trees[0][3][:room]
        logits = np.asarray(found.logits)[0]
        for step, node in enumerate(along):
            np.testing.assert_array_equal(logits[node], plain[lengths[0] + step], f"{lengths}")
        compared += len(along)
        # The other row falls behind, so that its windows, splits and steps are others.
        accepted = [int(rng.integers(1, len(along) + 1)), 1]
        paths = [(tree[3] * LEVELS)[: LEVELS + 1] for tree in trees]
        cache = steps.kept(cache, found, paths, lengths)
        lengths = [at + more for at, more in zip(lengths, accepted, strict=True)]
    return compared


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", TARGETS)
def test_a_node_has_the_bits_of_a_plain_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through several turns of the ring, and where a round must end before its reach."""
    compute_row_by_row(monkeypatch)
    assert compare(name, 540) > 540
