"""What quantised weights change: the figures, on a target small enough to check by hand."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.bench import quantised
from infer.bench.arguments import parser
from longspec_jax import LongSpec
from longspec_jax.models.target import Target
from longspec_jax.ops.attention.reference import causal_attention
from tests.kit import random_target, tiny_target_config


def test_scores_are_those_of_every_prefix() -> None:
    config = tiny_target_config()
    params = random_target(config)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 7))
    best, loss = quantised.scored(config, params, jnp.asarray(tokens))
    losses = []
    for row, text in enumerate(tokens):
        output: Any = Target(config).apply(
            {"params": params},
            jnp.asarray(text[None]),
            jnp.arange(7)[None],
            lambda layer, q, k, v: causal_attention(q, k, v),
        )
        logits = np.asarray(output.hidden[0] @ params["head"].T)
        np.testing.assert_array_equal(best[row], logits.argmax(axis=1))
        spread = np.asarray(jax.nn.logsumexp(logits, axis=1))
        losses += [spread[at] - logits[at, text[at + 1]] for at in range(6)]
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
