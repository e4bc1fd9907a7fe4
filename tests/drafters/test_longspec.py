"""The draft in decoding form: ring, window edge, and equality with running the whole path again."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.config import DraftConfig, TreeConfig
from longspec_jax.drafters.base import Context
from longspec_jax.drafters.longspec import (
    LongSpecDraft,
    LongSpecDrafter,
    ring_mask,
    ring_positions,
)
from longspec_jax.models.target import head_logits
from longspec_jax.ops.reference import prefix_attention, tree_attention
from tests.kit import draft_params, random_draft, random_target, tiny_target_config

TARGET = tiny_target_config()
WINDOW = 5
CONFIG = DraftConfig.for_target(TARGET, window=WINDOW)


def test_ring_positions_by_hand() -> None:
    np.testing.assert_array_equal(
        ring_positions(jnp.array([0, 2, 5, 7]), 5),
        [[-5, -4, -3, -2, -1], [0, 1, -3, -2, -1], [0, 1, 2, 3, 4], [5, 6, 2, 3, 4]],
    )


def test_window_edge_is_inclusive() -> None:
    """512 past keys and the query's own: a key exactly ``window`` positions behind is seen."""
    ring = ring_positions(jnp.array([7]), 5)  # positions 5 6 2 3 4
    mask = ring_mask(ring, jnp.array([[7, 8, 9]]), 5)
    np.testing.assert_array_equal(
        mask[0].astype(int), [[1, 1, 1, 1, 1], [1, 1, 0, 1, 1], [1, 1, 0, 0, 1]]
    )


def _setup(lengths: np.ndarray, seed: int = 0):
    target = random_target(TARGET)
    params = draft_params(random_draft(CONFIG), target)
    keys = jax.random.split(jax.random.key(seed), 3)
    slots = (len(lengths), TARGET.num_kv_heads, 32, TARGET.head_width)
    context = Context(
        jax.random.randint(keys[0], (len(lengths),), 0, TARGET.vocab_size),
        jnp.asarray(lengths),
        jax.random.normal(keys[1], slots),
        jax.random.normal(keys[2], slots),
    )
    tokens = np.random.default_rng(seed).integers(0, TARGET.vocab_size, (len(lengths), 32))
    return params, context, tokens.astype(np.int32)


def _path_logits(params, context, tokens, b: int, path: list[int]) -> np.ndarray:
    """Draft logits at the end of a path, from one dense pass over prompt and path without a ring."""
    length = int(context.length[b])
    text = jnp.asarray([*tokens[b, :length], int(context.pending[b]), *path])[None]
    distance = jnp.arange(text.shape[1])[:, None] - jnp.arange(text.shape[1])
    window = ((distance >= 0) & (distance <= WINDOW))[None]
    one = slice(b, b + 1)
    output = LongSpecDraft(CONFIG).apply(
        {"params": params.layer},
        params.embedding[text],
        jnp.arange(text.shape[1])[None],
        lambda q, k, v: tree_attention(q, k, v, window).out,
        lambda q: (
            prefix_attention(q, context.keys[one], context.values[one], context.length[one]).out
        ),
    )
    return np.asarray(head_logits(params.head, output.hidden[0, -1]))


def test_trees_hold_the_best_paths_of_the_draft() -> None:
    """Every proposed token and score agrees with the draft run over the whole path, ring wrapped."""
    lengths = np.array([17, 3], np.int32)
    params, context, tokens = _setup(lengths)
    drafter = LongSpecDrafter(CONFIG, TreeConfig((3, 4, 4)))
    state = drafter.prefill(params, jnp.asarray(tokens), jnp.asarray(lengths))
    seen = []

    def score(logits: jax.Array, depth: int) -> jax.Array:
        seen.append(logits)
        return jax.nn.log_softmax(logits)

    tree = drafter.propose(params, state, context, score)
    for b in range(2):
        nodes, parents = np.asarray(tree.tokens[b]), np.asarray(tree.parents[b])
        for node in range(1 + 3 + 4):  # The last level is never run.
            path, at = [], node
            while at > 0:
                path.insert(0, int(nodes[at]))
                at = int(parents[at])
            level, first = next((i, f) for i, f in ((2, 4), (1, 1), (0, 0)) if node >= f)
            expected = _path_logits(params, context, tokens, b, path)
            np.testing.assert_allclose(seen[level][b, node - first], expected, atol=2e-4)
    top = np.argsort(-np.asarray(seen[0][0, 0]))[:3]
    np.testing.assert_array_equal(tree.tokens[0, 1:4], top)


def test_a_restricted_draft_proposes_the_best_of_its_vocabulary() -> None:
    """As if the other tokens' logits were -inf; the ids it names are the whole vocabulary's."""
    lengths = np.array([17, 3], np.int32)
    params, context, tokens = _setup(lengths)
    vocabulary = jnp.asarray([90, 5, 7, 33, 61, 2, 71])
    drafter = LongSpecDrafter(CONFIG, TreeConfig((3, 4, 4)))
    state = drafter.prefill(params, jnp.asarray(tokens), jnp.asarray(lengths))
    outside = jnp.ones(TARGET.vocab_size, bool).at[vocabulary].set(False)

    def masked(logits: jax.Array, depth: int, vocabulary: jax.Array | None = None) -> jax.Array:
        return jax.nn.log_softmax(jnp.where(outside, -jnp.inf, logits))

    def restricted(logits: jax.Array, depth: int, vocabulary: jax.Array | None = None) -> jax.Array:
        assert vocabulary is not None and logits.shape[-1] == len(vocabulary)
        return jax.nn.log_softmax(logits)

    expected = drafter.propose(params, state, context, masked)
    tree = drafter.propose(params.restricted(vocabulary), state, context, restricted)
    for ours, theirs in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def widened(rounded: Any, whole: Any) -> Any:
    """The parameters that 8-bit ones stand for."""
    if "rows" not in rounded:
        return {
            key: widened(value, whole[key]) if isinstance(value, dict) else value
            for key, value in rounded.items()
        }
    kernel = (rounded["rows"] * rounded["scale"][:, None]).T.reshape(whole["kernel"].shape)
    assert 0 < np.abs(kernel - whole["kernel"]).max() < 0.01 * np.abs(whole["kernel"]).max()
    others = {key: value for key, value in rounded.items() if key not in ("rows", "scale")}
    return {"kernel": kernel, **others}


def test_a_draft_in_8_bits_proposes_what_its_rounded_weights_do() -> None:
    """Scores are those of the weights that the steps and their scales stand for."""
    lengths = np.array([17, 3], np.int32)
    params, context, tokens = _setup(lengths)
    rounded = params.in_int8()
    table = rounded.head.astype(jnp.float32) * rounded.head_scale[:, None]
    assert 0 < np.abs(table - params.head).max() < 0.01 * np.abs(params.head).max()
    drafter = LongSpecDrafter(CONFIG, TreeConfig((3, 4, 4)))
    state = drafter.prefill(rounded, jnp.asarray(tokens), jnp.asarray(lengths))
    stood_for = params.replace(head=table, layer=widened(rounded.layer, params.layer))
    same = drafter.prefill(stood_for, jnp.asarray(tokens), jnp.asarray(lengths))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), state, same)
    seen = []

    def score(logits: jax.Array, depth: int) -> jax.Array:
        seen.append(logits)
        return jax.nn.log_softmax(logits)

    tree = drafter.propose(rounded, state, context, score)
    expected = drafter.propose(stood_for, state, context, score)
    np.testing.assert_array_equal(tree.tokens, expected.tokens)
    for ours, theirs in zip(seen[:3], seen[3:], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_committing_equals_prefilling_the_longer_text() -> None:
    lengths = np.array([9, 2, 13], np.int32)
    params, _, tokens = _setup(lengths)
    drafter = LongSpecDrafter(CONFIG, TreeConfig((2, 2, 2)))
    state = drafter.prefill(params, jnp.asarray(tokens), jnp.asarray(lengths))
    counts = np.array([4, 1, 0], np.int32)
    block = np.stack([tokens[b, n : n + 4] for b, n in enumerate(lengths)])
    committed = drafter.commit(
        params, state, jnp.asarray(block), jnp.asarray(counts), jnp.asarray(lengths)
    )
    fresh = drafter.prefill(params, jnp.asarray(tokens), jnp.asarray(lengths + counts))
    for ours, theirs in zip(jax.tree.leaves(committed), jax.tree.leaves(fresh), strict=True):
        present = np.asarray(ring_positions(jnp.asarray(lengths + counts), WINDOW)) >= 0
        np.testing.assert_allclose(
            np.asarray(ours)[present], np.asarray(theirs)[present], atol=1e-5
        )
