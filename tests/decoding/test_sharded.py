"""Decoding with the kernels on a mesh: the same tokens, and no device ever holds a whole cache."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config import DraftConfig, TreeConfig
from longspec_jax.decoding.engine import Request, SpecState, decode, prefill
from longspec_jax.decoding.sampling import Sampling
from longspec_jax.decoding.target import CachedTarget
from longspec_jax.drafters.base import Drafter, Params
from longspec_jax.drafters.hierarchy import Hierarchy
from longspec_jax.drafters.longspec.drafter import LongSpecDrafter
from longspec_jax.drafters.selection import SinksAndRecent
from longspec_jax.drafters.streaming import StreamingDrafter
from longspec_jax.ops.layer import (
    append_rows,
    append_rows_pallas,
    residual_norm,
    residual_norm_pallas,
    split_heads,
    split_heads_pallas,
)
from longspec_jax.sharding import make_mesh, param_shardings
from tests.kit import draft_params, random_draft, random_target, tiny_target_config

CONFIG = tiny_target_config(
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_width=16,
    model_width=32,
    mlp_width=54,
    vocab_size=18,
)
DRAFT = DraftConfig.for_target(CONFIG, window=11)
CAPACITY = 256
PROMPT = jnp.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]])


def interpret_layer_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the small ops of a layer as interpreted kernels too."""
    for op, kernel in (
        (append_rows, append_rows_pallas),
        (residual_norm, residual_norm_pallas),
        (split_heads, split_heads_pallas),
    ):
        name = op.__name__.rpartition(".")[2]
        interpreted = functools.partial(getattr(kernel, name), interpret=True)
        monkeypatch.setattr(kernel, name, interpreted)
        monkeypatch.setattr(op, "decodes_on_ampere", lambda rows, dtype: True)


def longspec(attention: str | None) -> Drafter:
    """A draft model, which reads the last layer's cache."""
    return LongSpecDrafter(DRAFT, TreeConfig((2,)), attention)


def partial_passes(attention: str | None) -> Drafter:
    """The target over spans of all layers' caches, behind a chain and a tree."""
    inner = StreamingDrafter(TreeConfig((1,)), SinksAndRecent(1, 2))
    return Hierarchy(inner, SinksAndRecent(2, 3), rounds=2)


def start(
    drafter: Callable[[str | None], Drafter], target: Any, draft: Any, attention: str | None = None
) -> tuple[Any, ...]:
    """The arguments of the decode loop after prefill."""
    models = CachedTarget(CONFIG, attention), drafter(attention)
    params = Params(target, draft_params(draft, target))
    greedy = Sampling.greedy(2)
    request = Request(greedy, jnp.full((2, 1), -1), jnp.full(2, 9))
    length = jnp.asarray([5, 3])
    options = dict(capacity=CAPACITY, max_emitted=9, chunk=8)
    state = prefill(*models, params, PROMPT, length, request, **options)
    return *models, params, request, state


def largest_gathered(text: str) -> int:
    """Elements of the largest array that the compiled program gathers."""
    shapes = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", text)
    return max((int(np.prod([int(n) for n in s.split(",") if n])) for s in shapes), default=0)


@pytest.mark.parametrize("drafter", [longspec, partial_passes])
def test_a_mesh_decodes_the_same_tokens(
    drafter: Callable[[str | None], Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = random_target(CONFIG), random_draft(DRAFT)
    expected: SpecState = decode(*start(drafter, *tables))
    np.testing.assert_array_equal(expected.emitted, 9)
    interpret_layer_ops(monkeypatch)
    mesh = make_mesh(tp=2)
    shares = (jax.device_put(table, param_shardings(mesh, table)) for table in tables)
    arguments = start(drafter, *shares, "interpret")
    cache = arguments[-1].cache.keys[0]
    assert cache.sharding.shard_shape(cache.shape)[1] == 1
    compiled = decode.lower(*arguments).compile()
    # Logits are gathered; keys, values and a layer's weights never.
    weights = jax.tree.leaves(tables[0]["layers_0"])
    smallest = min(leaf.size for leaf in weights if leaf.ndim > 1)
    assert 0 < largest_gathered(compiled.as_text()) < min(smallest, cache.size // 2)
    np.testing.assert_array_equal(compiled(*arguments[2:]).output, expected.output)
