"""The name tables name exactly the parameters of the models, and every stored tensor once."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.config.known import PRESETS
from longspec_jax.config.layers import ExpertsConfig, LayerConfig, Rotary
from longspec_jax.drafters.checkpoints.longspec import draft_table
from longspec_jax.drafters.longspec import DraftConfig, LongSpecLayer
from longspec_jax.models.target import Target
from longspec_jax.sharding import path_name
from longspec_jax.weights.tables import target_table
from tests.kit import each_row, tiny_target_config

TARGETS = {
    "MHA": tiny_target_config(num_kv_heads=6),
    "GQA": tiny_target_config(),
    "MQA": tiny_target_config(num_kv_heads=1),
    "biases": tiny_target_config(qkv_bias=True),
    "head norms": tiny_target_config(qk_norm=True, head_width=10),
    "tied": tiny_target_config(tied_embeddings=True),
    "norms behind": tiny_target_config(wide_qk_norm=True, pre_norms=False, post_norms=True),
    "experts": tiny_target_config(
        kinds=(LayerConfig(Rotary(), experts=ExpertsConfig(5, 2, 7)), LayerConfig(Rotary())),
        pattern=(1, 0),
    ),
}


def _shapes(params):
    return {path_name(p): leaf.shape for p, leaf in jax.tree_util.tree_leaves_with_path(params)}


def _target_shapes(config):
    tokens = jnp.zeros((1, 2), jnp.int32)
    init = jax.eval_shape(
        lambda: Target(config).init(jax.random.key(0), tokens, method="initialize")
    )
    return _shapes(init["params"])


def _draft_shapes(config):
    def init():
        embedded = jnp.zeros((1, 2, config.model_width), jnp.dtype(config.dtype))
        positions = jnp.zeros((1, 2), jnp.int32)
        key = jax.random.key(0)
        return LongSpecLayer(config).init(key, embedded, positions, lambda q, k, v: q, lambda q: q)

    return _shapes(jax.eval_shape(init)["params"])


@each_row("config", [*TARGETS.values(), replace(PRESETS["qwq-32b"], num_layers=2)])
def test_target_leaves(config):
    leaves = target_table(config).leaves
    assert {leaf.path: leaf.shape for leaf in leaves} == _target_shapes(config)
    assert len({leaf.path for leaf in leaves}) == len(leaves)


@each_row("config", TARGETS.values())
def test_draft_leaves(config):
    draft = DraftConfig.for_target(config)
    leaves = draft_table(draft).leaves
    assert {leaf.path: leaf.shape for leaf in leaves} == _draft_shapes(draft)


@each_row("config", TARGETS.values())
def test_parts_tile_their_leaf(config):
    """No element is left out or written twice: stored and own sizes agree, names are unique."""
    for table in (target_table(config), draft_table(DraftConfig.for_target(config))):
        parts = [part for leaf in table.leaves for part in leaf.parts]
        assert len(table.parts) == len(parts)
        for leaf in table.leaves:
            ends = [part.start + part.depth for part in leaf.parts]
            assert [0, *ends[:-1]] == [part.start for part in leaf.parts]
            assert ends[-1] == leaf.shape[leaf.stack]
            assert sum(np.prod(part.shape) for part in leaf.parts) == np.prod(leaf.shape)


@each_row(
    "target, name, dropped",
    [
        ("tied", "model.layers.1.self_attn.rotary_emb.inv_freq", True),
        ("tied", "model.rotary_emb.inv_freq", True),
        ("tied", "lm_head.weight", True),
        ("GQA", "lm_head.weight", False),
        ("tied", "model.layers.1.self_attn.q_proj.bias", False),
        ("tied", "lm_head.weight_scale", False),
    ],
)
def test_dropped_names(target, name, dropped):
    assert target_table(TARGETS[target]).drops(name) is dropped
