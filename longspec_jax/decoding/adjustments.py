"""Adjusted logits: biases of single tokens, and penalties for tokens that a row already has.

A node of a tree is adjusted for the tokens of its own path: the row's prompt, the tokens it has
emitted (the pending one among them), and the draft tokens from below the root down to the node.
These are the tokens that plain decoding would have emitted by then, so that plain decoding and
every tree draw from the same logits (:func:`adjust` serves both).

The order is that of vLLM and transformers: ``logit_bias`` is added, the repetition penalty divides
or multiplies, the frequency and presence penalties are subtracted. Temperature and filters follow.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int, Shaped

from longspec_jax.axes import Array, Leaf, Lengths

ADJUSTMENT_BYTES = 4 + 4 + 1
"""Of a token of the vocabulary in the tables of a row."""


@struct.dataclass
class AdjustmentOptions:
    """What each row of a batch asks for, on the host."""

    repetition_penalty: Leaf[Float[Array, " B"]]
    """Of tokens in the prompt or emitted; 1 for none."""
    presence_penalty: Leaf[Float[Array, " B"]]
    """Of emitted tokens; 0 for none."""
    frequency_penalty: Leaf[Float[Array, " B"]]
    """Of emitted tokens, each time; 0 for none."""
    bias_tokens: Leaf[Int[Array, "B n"]]
    """Tokens with a bias; padded with -1."""
    bias: Leaf[Float[Array, "B n"]]
    """What is added to their logits."""

    @classmethod
    def none(cls, rows: int) -> "AdjustmentOptions":
        """Rows whose logits stay as they are."""
        return cls.of(np.ones(rows), np.zeros(rows), np.zeros(rows), [{}] * rows)

    @classmethod
    def of(
        cls,
        repetition: ArrayLike | Sequence[float],
        presence: ArrayLike | Sequence[float],
        frequency: ArrayLike | Sequence[float],
        biases: Sequence[Mapping[int, float]],
    ) -> "AdjustmentOptions":
        """Options of rows whose biases are given by token."""
        shape = len(biases), max(map(len, biases))
        tokens, bias = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
        for row, given in enumerate(biases):
            tokens[row, : len(given)], bias[row, : len(given)] = [*given], [*given.values()]
        penalties = np.asarray((repetition, presence, frequency), np.float32)
        return cls(*penalties, bias_tokens=tokens, bias=bias)  # pyright: ignore[reportArgumentType]

    @property
    def neutral(self) -> bool:
        """Whether no row's logits change."""
        penalties = (self.repetition_penalty != 1, self.presence_penalty, self.frequency_penalty)
        return not (np.any(penalties) or np.any(self.bias))

    def padded(self, width: int) -> "AdjustmentOptions":
        """The same, with space for this many biases in every row."""
        missing = ((0, 0), (0, width - self.bias.shape[1]))
        tokens = np.pad(self.bias_tokens, missing, constant_values=-1)
        return replace(self, bias_tokens=tokens, bias=np.pad(self.bias, missing))


def fitted(wanted: AdjustmentOptions | None, adjusted: bool) -> AdjustmentOptions | None:
    """What a request asks for, as all requests of an engine have it.

    Raises:
      ValueError: if they would need them and have none.
    """
    if adjusted:
        return wanted or AdjustmentOptions.none(1)
    if wanted is not None and not wanted.neutral:
        raise ValueError(
            "a request with logit_bias or a penalty does not fit an engine made without tables "
            "for them; make the engine with enable_penalties=True"
        )
    return None


@struct.dataclass
class Adjustments:
    """What adjusts the logits of every row, on the device."""

    bias: Leaf[Float[Array, "B V"]]
    in_prompt: Leaf[Bool[Array, "B V"]]
    """Whether the prompt holds a token."""
    emitted: Leaf[Int[Array, "B V"]]
    """How often the row has emitted a token, the pending one included."""
    repetition_penalty: Leaf[Float[Array, " B"]]
    presence_penalty: Leaf[Float[Array, " B"]]
    frequency_penalty: Leaf[Float[Array, " B"]]

    @classmethod
    def empty(cls, rows: int, vocabulary: int) -> "Adjustments":
        """The adjustments of vacant slots, on the host."""
        none = np.zeros((rows, 0), np.int32)
        return cls.of_prompts(AdjustmentOptions.none(rows), none, np.zeros(rows, int), vocabulary)

    @classmethod
    def of_prompts(
        cls,
        options: AdjustmentOptions,
        tokens: Int[Any, "B P"],
        length: Int[Any, " B"],
        vocabulary: int,
        emitted: Int[Any, " B"] | None = None,
    ) -> "Adjustments":
        """The adjustments of rows that have only their prompts, on the host.

        Args:
          tokens: prompts, right-padded with any token.
          emitted: how many of the last tokens of each prompt the row had emitted before, such as
            those of a request that goes on; none if absent.
        """
        rows = len(length)
        bias, counts = np.zeros((rows, vocabulary), np.float32), np.zeros((rows, vocabulary), int)
        in_prompt = np.zeros((rows, vocabulary), bool)
        for row, prompt in enumerate(np.asarray(tokens)):
            own = length[row] - (0 if emitted is None else emitted[row])
            in_prompt[row, prompt[:own]] = True
            counts[row] = np.bincount(prompt[own : length[row]], minlength=vocabulary)
            there = options.bias_tokens[row] >= 0
            bias[row, options.bias_tokens[row][there]] = options.bias[row][there]
        penalties = (
            options.repetition_penalty,
            options.presence_penalty,
            options.frequency_penalty,
        )
        return cls(bias, in_prompt, counts.astype(np.int32), *penalties)  # pyright: ignore[reportArgumentType]

    def after(self, tokens: Int[Array, "B h"], count: Lengths) -> "Adjustments":
        """The same after the rows emitted the first ``count[b]`` of these tokens."""
        emitted = self.emitted
        for step in range(tokens.shape[1]):
            here = jnp.where(step < count, tokens[:, step], -1)
            emitted += jnp.arange(emitted.shape[1]) == here[:, None]
        return replace(self, emitted=emitted)

    def among(self, tokens: Int[Array, "*B v"]) -> "Adjustments":
        """The same for the logits of only these tokens, the same in all rows or each row's own."""
        return replace(
            self,
            bias=among(self.bias, tokens),
            in_prompt=among(self.in_prompt, tokens),
            emitted=among(self.emitted, tokens),
        )


def among(table: Shaped[Array, "B *more V"], tokens: Int[Array, "*B v"]) -> Array:
    """The columns ``[B, ..., v]`` of some tokens, the same in all rows or each row's own."""
    if tokens.ndim == 1:
        return jnp.take(table, tokens, axis=-1)
    return jax.vmap(lambda row, own: jnp.take(row, own, axis=-1))(table, tokens)


def adjust(
    logits: Float[Array, "B T V"],
    adjustments: Adjustments,
    paths: Int[Array, "B T levels"] | None = None,
) -> Float[Array, "B T V"]:
    """Logits with biases and penalties.

    Args:
      logits: of the tokens that follow some nodes.
      paths: draft tokens that each node's path adds to what the row has emitted, of
        :func:`~longspec_jax.drafters.tree.tree_paths`; none if absent.
    """
    emitted, vocabulary = adjustments.emitted[:, None], jnp.arange(logits.shape[2])
    if paths is not None:
        for level in range(paths.shape[2]):
            emitted = emitted + (vocabulary == paths[:, :, level, None])
    seen = adjustments.in_prompt[:, None] | (emitted > 0)

    def by_row(values: Array) -> Array:
        return values[:, None, None]

    biased, repetition = logits + adjustments.bias[:, None], by_row(adjustments.repetition_penalty)
    repeated = jnp.where(biased > 0, biased / repetition, biased * repetition)
    frequency = by_row(adjustments.frequency_penalty) * emitted
    # Products are rounded before they are added up. The compiler may else leave one unrounded, and
    # do so in the pass of one shape and not of another.
    scaled, frequency = jax.lax.optimization_barrier((jnp.where(seen, repeated, biased), frequency))
    return scaled - frequency - jnp.where(emitted > 0, by_row(adjustments.presence_penalty), 0.0)
