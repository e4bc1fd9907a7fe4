"""Log-probabilities of tokens and of their best alternatives: the target's own, in float32.

They are those of the model: before temperature, filters, biases and penalties. A token's own and
those of its alternatives are differences of the same two numbers each, so that equal tokens have
equal floats.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from longspec_jax.axes import Array
from longspec_jax.config.sampling import MOST_ALTERNATIVES
from longspec_jax.decoding.jit_cache import program
from longspec_jax.ops.slicing import whole_chunks

SLICE = 128
"""Tokens of prompts whose logits exist at once."""


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a token, and of its most likely alternatives."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """Tokens and their log-probabilities, the most likely first; equal ones by token id."""


def packed_width(most: int) -> int:
    """Numbers that :func:`packed_logprobs` gives for a token."""
    return 1 + 2 * most


def packed_logprobs(
    logits: Float[Array, "B n V"], tokens: Int[Array, "B n"], most: int
) -> Int[Array, "B n m"]:
    """Log-probabilities as whole numbers of the same bits, for a report.

    Returns:
      The token's own log-probability, the ids of the alternatives, -1 after the last token of the
      vocabulary, and their log-probabilities.
    """
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    # No token is drawn from logits that are not finite; any other one will do for it.
    own = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[..., None], axis=-1)
    best, ids = jax.lax.top_k(logits, min(most, logits.shape[-1]))
    missing = [(0, 0)] * (logits.ndim - 1) + [(0, most - ids.shape[-1])]
    ids = jnp.pad(ids.astype(jnp.int32), missing, constant_values=-1)
    bits = jax.lax.bitcast_convert_type(jnp.concatenate([own, best], axis=-1) - total, jnp.int32)
    return jnp.concatenate([bits[..., :1], ids, jnp.pad(bits[..., 1:], missing)], axis=-1)


def prompt_logprobs(
    unembed: Callable[[Array], Array],
    hidden: Float[Array, "B C D"],
    tokens: Int[Array, "B C"],
    most: int,
) -> Int[Array, "B C m"]:
    """Packed log-probabilities of tokens of prompts, a slice of their logits at a time.

    Args:
      hidden: of the tokens before these.
    """
    rows, chunk = tokens.shape
    size = min(chunk, max(1, SLICE // rows))

    def sliced(part: Array) -> Array:
        part = whole_chunks(part, size)
        return jnp.moveaxis(part.reshape(rows, -1, size, *part.shape[2:]), 1, 0)

    def scored(part: tuple[Array, Array]) -> Array:
        return packed_logprobs(unembed(part[0]), part[1], most)

    packed = jax.lax.map(scored, (sliced(hidden), sliced(tokens)))
    return jnp.moveaxis(packed, 0, 1).reshape(rows, -1, packed.shape[-1])[:, :chunk]


def unpacked_logprobs(packed: Int[Any, "n m"], most: int) -> tuple[TokenLogprob, ...]:
    """What :func:`packed_logprobs` gave for some tokens, with ``most`` alternatives at most.

    Nothing if these are fewer than none.
    """
    if most < 0:
        return ()
    width = (packed.shape[1] - 1) // 2
    floats = np.ascontiguousarray(packed).view(np.float32)
    own, best = floats[:, 0].tolist(), floats[:, 1 + width : 1 + width + most].tolist()
    ids = packed[:, 1 : 1 + min(width, most)].tolist()
    return tuple(
        TokenLogprob(one, tuple(pair for pair in zip(*row, strict=True) if pair[0] >= 0))
        for one, *row in zip(own, ids, best, strict=True)
    )


class PromptLogprobs(Sequence[TokenLogprob | None]):
    """Those of a prompt's tokens, unpacked when they are read; the first has none.

    131,072 tokens with 20 alternatives take two seconds of Python, in which the thread that steps
    an engine must not stand still.
    """

    def __init__(self, packed: Sequence[Int[Any, "_ m"]], count: int, most: int) -> None:
        """Keep what is packed.

        Args:
          packed: of the tokens after the first one, in parts; garbage from ``count`` on.
          count: of these tokens.
          most: alternatives to unpack.
        """
        self._parts, self._count, self._most = packed, count, most

    def __len__(self) -> int:
        """Tokens of the prompt."""
        return 1 + self._count

    @overload
    def __getitem__(self, index: int) -> TokenLogprob | None: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TokenLogprob | None, ...]: ...
    def __getitem__(
        self, index: int | slice
    ) -> TokenLogprob | None | tuple[TokenLogprob | None, ...]:
        """One entry, or those of a slice as a tuple."""
        return tuple(self)[index]

    def __iter__(self) -> Iterator[TokenLogprob | None]:
        """The entries, unpacked a few at a time."""
        yield None
        left = self._count
        for part in self._parts:
            for begin in range(0, min(len(part), left), SLICE):
                yield from unpacked_logprobs(part[begin : min(begin + SLICE, left)], self._most)
            left -= min(len(part), left)

    def without_alternatives(self) -> "PromptLogprobs":
        """The same with nothing but each token's own."""
        return PromptLogprobs(self._parts, self._count, 0)


def check_alternatives(most: int | None, *asked: Int[Any, " B"] | None) -> None:
    """Refuse a request for more log-probabilities than an engine reports.

    Args:
      most: alternatives of a token that the engine reports; None for no log-probabilities.
      asked: alternatives that a request asks for in each row, -1 for no log-probabilities; None for
        none in all.

    Raises:
      ValueError: says how the engine must be made.
    """
    wanted = max((int(one.max()) for one in asked if one is not None), default=-1)
    if wanted >= 0 and most is None:
        raise ValueError(
            "a request for log-probabilities does not fit an engine made without them; make the "
            f"engine with logprobs={MOST_ALTERNATIVES}"
        )
    if most is not None and wanted > most:
        raise ValueError(
            f"a request for {wanted} alternatives of a token does not fit an engine made with "
            f"logprobs={most}; make the engine with more"
        )


@program(static_argnames=("most",))
def first_logprobs(
    first: Int[Array, "B n"], logits: Float[Array, "B V"], most: int
) -> Int[Array, "B m"]:
    """What is read of prefilled rows, their first token first, with its log-probabilities."""
    packed = packed_logprobs(logits[:, None], first[:, :1], most)[:, 0]
    return jnp.concatenate([first, packed], axis=1)
