"""One order of summation on a mesh: what travels between devices, and the bits of logits."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.layers import ExpertsConfig, LayerConfig, Rotary
from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding import target as target_lib
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.round import many_rounds
from longspec_jax.decoding.rows import Request, RowShardings
from longspec_jax.decoding.sampling import Sampling, SamplingKind
from longspec_jax.decoding.target import TargetModel, Verification
from longspec_jax.drafters.base import Drafter, NoDraft, Params
from longspec_jax.drafters.ngram import NgramDrafter
from longspec_jax.ops import hardware
from longspec_jax.ops.attention import dispatch, tiles
from longspec_jax.ops.partitioned import use_mesh
from longspec_jax.sharding import make_mesh, param_shardings
from tests.decoding.test_sharded import interpret_layer_ops
from tests.kit import ALL_PASSES, hopper_mesh, normal, prefill, random_target, tiny_target_config
from tests.ops.attention.interpreted import interpret, interpret_devices_apart

pytestmark = pytest.mark.full

CONFIG = tiny_target_config(
    num_layers=1,
    num_heads=8,
    num_kv_heads=4,
    head_width=64,
    model_width=64,
    mlp_width=128,
    vocab_size=64,
    dtype="bfloat16",
)
EXPERTS = LayerConfig(Rotary(), experts=ExpertsConfig(count=8, chosen=2, width=64))


def spread(axes: dict[str, int], **sizes: Any) -> tuple[TargetModel, Any]:
    """A target of one order, with its parameters on a mesh."""
    mesh, config = make_mesh(**axes), dataclasses.replace(CONFIG, **sizes)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), random_target(config))
    target = TargetModel(config, mesh=mesh.abstract_mesh, batch_invariant=True)
    return target, jax.device_put(params, param_shardings(mesh, params))


def added(text: str) -> list[str]:
    """What the all-reduces of a compiled program do that add up floating-point numbers."""
    adds = re.compile(r"ROOT \S+ = (?:f32|bf16)\[\]\S* add\(")
    bodies = dict(re.findall(r"^%?([\w.-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    calls = re.findall(r" all-reduce(?:-start)?\(.*", text)
    assert not re.search(r" reduce-scatter\(", text) and calls
    return [
        "/".join(re.search(r'op_name="([^"]*)"', call)[1].split("/")[-2:])
        for call in calls
        if adds.search(bodies[re.search(r"to_apply=%?([\w.-]+)", call)[1]])
    ]


@pytest.mark.parametrize(
    ("drafter", "layers"),
    [
        pytest.param(NoDraft(), {}, id="plain"),
        pytest.param(NgramDrafter(TreeConfig((2, 2))), {}, id="tree"),
        pytest.param(
            NoDraft(), dict(pre_norms=False, post_norms=True, wide_qk_norm=True), id="OLMo 2"
        ),
        pytest.param(NoDraft(), dict(kinds=(EXPERTS,), pattern=(0,)), id="experts"),
    ],
)
def test_devices_add_up_nothing_but_what_one_of_them_has(
    drafter: Drafter, layers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An all-reduce adds up in an order that its library chooses by the number of rows.

    One that looks up a row of a table, or the score of a token, adds zeros to it. Other sums, such
    as those of top-p, are of whole numbers.
    """
    same = functools.partial(dispatch.path_attention, implementation="reference")
    monkeypatch.setattr(target_lib, "path_attention", same)
    interpret_layer_ops(monkeypatch)
    target, params = spread({"data": 2, "tp": 4}, **layers)
    nucleus = dataclasses.replace(
        Sampling.greedy(2), temperature=jnp.ones(2), top_p=jnp.full(2, 0.9), kind=SamplingKind.ANY
    )
    request = Request(nucleus, jnp.full((2, 1), -1), jnp.full(2, 9))
    models = target, drafter, Params(params, None)
    prompt, length = jnp.arange(10).reshape(2, 5), jnp.asarray([5, 3])
    rows = prefill(*models, prompt, length, request, capacity=256, chunk=8)

    def sums(target: TargetModel) -> list[str]:
        operands = SamplingKind.ANY, models[2], rows, np.int32(8)
        return added(many_rounds.lower(target, drafter, *operands).compile(ALL_PASSES).as_text())

    exact = {"Target.look_up/reduce_sum", "jit(take_along_axis)/gather"}
    assert set(sums(target)) == exact
    # Negative control: of XLA's matmuls every layer adds up the results.
    others = set(sums(dataclasses.replace(target, batch_invariant=False))) - exact
    assert any(name.endswith("/dot_general") for name in others)


@pytest.mark.slow
@pytest.mark.skipif(not hardware.mosaic_is_supported(), reason="needs jax 0.11 or newer")
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_every_share_is_multiplied_by_the_kernels(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left to XLA's matmuls, which would take any share.

    They are those of queries, of attention's two kernels and its output, of an MLP, and of the LM
    head; and of a router.
    """
    monkeypatch.setattr(hardware, "compute_capability", lambda: (9, 0))
    more: Any = dict(kinds=(EXPERTS,), pattern=(0,)) if kind == "experts" else {}
    config = dataclasses.replace(CONFIG, mlp_width=256, **more)
    target = TargetModel(config, mesh=hopper_mesh(data=2, fsdp=1, tp=4), batch_invariant=True)
    tokens, mask = jnp.zeros((2, 16), jnp.int32), jnp.ones((2, 16, 16), bool)

    def logits(params: Any, cache: KVCache) -> jax.Array:
        with use_mesh(target.mesh):
            length = jnp.full(2, 2000)
            return target.verify(params, cache, tokens, tokens, mask, length, levels=5).logits

    operands = jax.eval_shape(lambda: (random_target(config), target.allocate(2, 4096)))
    with use_mesh(target.mesh):
        text = jax.jit(logits).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == (8 if more else 7)
    assert "dot_general" not in text


@pytest.mark.slow
@pytest.mark.skipif(not hardware.mosaic_is_supported(), reason="needs jax 0.11 or newer")
def test_a_node_s_logits_have_the_bits_of_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 1 of one of two rows on two groups of devices, and a row that is whole on each."""
    interpret(monkeypatch, "bfloat16")
    interpret_devices_apart(monkeypatch)
    interpret_layer_ops(monkeypatch)
    monkeypatch.setattr(hardware, "require_hopper", lambda kernel: None)
    monkeypatch.setattr(hardware, "require_one_order", lambda kernel: True)
    monkeypatch.setattr(tiles, "MULTIPROCESSORS", 2)  # The interpreter runs them in turns.
    target, params = spread({"data": 2, "tp": 2}, num_heads=4, num_kv_heads=2)

    @functools.partial(jax.jit, static_argnums=4)
    def verify(
        params: Any, cache: KVCache, tokens: jax.Array, length: jax.Array, levels: int
    ) -> Verification:
        rows, nodes = tokens.shape
        positions = length[:, None] + jnp.arange(nodes)
        mask = jnp.tril(jnp.ones((rows, nodes, nodes), bool))
        with use_mesh(target.mesh):
            return target.verify(params, cache, tokens, positions, mask, length, levels)

    def verified(cache: KVCache, *operands: Any) -> Verification:
        where = RowShardings.for_params(params, len(cache.keys[0])).cache
        return verify(params, jax.device_put(cache, where), *operands)

    cache = KVCache(*((normal(seed, 2, 2, 256, 64, dtype="bfloat16"),) for seed in (0, 1)))
    tokens, length = jnp.arange(16).reshape(2, 8), jnp.asarray([130, 40])
    tree = verified(cache, tokens, length, 7)
    first = jnp.zeros((2, 1), jnp.int32), length, jnp.ones(2, jnp.int32), {}
    cache = jax.tree.map(lambda leaf: leaf[:1], cache.commit(tree.keys, tree.values, *first))
    plain = verified(cache, tokens[:1, 1:2], length[:1] + 1, 0)
    np.testing.assert_array_equal(plain.logits[0, 0], tree.logits[0, 1])
    assert np.abs(tree.logits[0, 0] - tree.logits[0, 1]).max() > 0.1
