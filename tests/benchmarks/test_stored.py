"""Random quantised targets have the weights that a loaded one has in its own bits."""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.arguments import SHAPES
from benchmarks.models import random_model, target_bytes
from longspec_jax.decoding.target import TargetModel
from longspec_jax.ops.matmul.quantised_weights import QuantisedMatrix


def test_recurrent_layers_stay_whole() -> None:
    """As the loader leaves them; a forward over a cache takes the rest as it is stored."""
    config = SHAPES["qwen35-4b"]

    def drawn() -> Any:
        model = random_model(config, kind="ngram", weights="w4a16")
        return model.params.target

    params = jax.eval_shape(drawn)
    is_matrix = lambda leaf: isinstance(leaf, QuantisedMatrix)  # noqa: E731
    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_matrix)
    matrices = {jax.tree_util.keystr(path): leaf for path, leaf in found if is_matrix(leaf)}
    attention = config.num_layers - len(config.recurrent_layers)
    assert len(matrices) == 2 * config.num_layers + 2 * attention
    assert not any("recurrence" in path for path in matrices)
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    assert stored == target_bytes(config, "w4a16")

    def verified(params: Any) -> Any:
        target = TargetModel(config)
        tokens, mask = jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2, 2), bool)
        cache, length = target.allocate(1, 64), jnp.full(1, 9)
        return target.verify(params, cache, tokens, tokens, mask, length, levels=2).logits

    assert jax.eval_shape(verified, params).shape == (1, 2, config.vocab_size)
