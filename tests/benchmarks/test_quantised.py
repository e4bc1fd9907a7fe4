"""What quantised weights change: the figures, on a target small enough to check by hand."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import quantised
from benchmarks.arguments import parser
from longspec_jax import LongSpec
from longspec_jax.models.target import Target
from longspec_jax.ops.attention.reference import causal_attention
from tests.kit import random_target, tiny_target_config


def test_scores_are_those_of_every_prefix() -> None:
    config = tiny_target_config(num_layers=1)
    params = random_target(config)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 7))
    best, loss = quantised.scored(config, params, jnp.asarray(tokens))

    @jax.jit
    def logits_of(tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(7), (2, 7))
        output: Any = Target(config).apply(
            {"params": params}, tokens, positions, lambda layer, q, k, v: causal_attention(q, k, v)
        )
        return output.hidden @ params["head"].T

    logits = np.asarray(logits_of(jnp.asarray(tokens)))
    np.testing.assert_array_equal(best, logits.argmax(axis=2))
    spread = np.log(np.exp(logits).sum(axis=2))
    losses = [
        spread[row, at] - logits[row, at, text[at + 1]]
        for row, text in enumerate(tokens)
        for at in range(6)
    ]
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)


def test_named_checkpoints_are_measured_instead_of_self_made_ones(tmp_path: Path) -> None:
    arguments = parser().parse_args(["quantised", "--quantised=a", "--quantised=b"])
    assert [*quantised.sources(arguments, tmp_path)][1:] == ["a", "b"]
    made = [*quantised.sources(parser().parse_args(["quantised"]), tmp_path)]
    assert [Path(each).name for each in made] == ["target", "fp8", "w4a16"]
    assert all((Path(each) / "model.safetensors").is_file() for each in made)


def test_texts_need_a_tokenizer() -> None:
    config = tiny_target_config()
    with pytest.raises(ValueError, match="has no tokenizer"):
        quantised._beginning(LongSpec(config, random_target(config)), "text", 3)
