"""Weights of published models, and what the Hopper kernel makes of them."""

from typing import NamedTuple

import jax

from longspec_jax.ops.matmul import ordered
from longspec_jax.ops.matmul.ordered_tiles import MatmulTile, Work, head_tile, matmul_tile
from tests.kit import normal


class Weights(NamedTuple):
    """What a decode step multiplies few rows by."""

    contracted: int
    columns: int
    """Of the result; of each of two matmuls where they are gated."""
    gated: bool = False
    split: bool = False
    """Whether split-K partials may be left."""
    head: bool = False
    """Whether it is an LM head, ``[columns, contracted]``."""

    @property
    def tile(self) -> MatmulTile:
        """The tile that is chosen."""
        sizes = self.contracted, self.columns
        return (
            head_tile(*sizes)
            if self.head
            else matmul_tile(*sizes, gated=self.gated, split=self.split)
        )

    def work(self, rows: int) -> Work:
        """The work on this many rows."""
        sizes = rows, self.contracted, self.columns
        return Work(*sizes, self.tile, parts=2 if self.gated else 1, head=self.head)


MODELS = {
    # Width, heads, key/value heads, head width, MLP width, vocabulary.
    "Vicuna-7B": (4096, 32, 32, 128, 11008, 32000),
    "Vicuna-13B": (5120, 40, 40, 128, 13824, 32000),
    "Llama-3.2-1B": (2048, 32, 8, 64, 8192, 128256),
    "Llama-3.2-3B": (3072, 24, 8, 128, 8192, 128256),
    "Llama-3-8B": (4096, 32, 8, 128, 14336, 128256),
    "Llama-3-70B": (8192, 64, 8, 128, 28672, 128256),
    "Mistral-7B-v0.3": (4096, 32, 8, 128, 14336, 32768),
    "Mistral-Nemo": (5120, 32, 8, 128, 14336, 131072),
    "Qwen2.5-0.5B": (896, 14, 2, 64, 4864, 151936),
    "Qwen2.5-1.5B": (1536, 12, 2, 128, 8960, 151936),
    "Qwen2.5-3B": (2048, 16, 2, 128, 11008, 151936),
    "Qwen2.5-7B": (3584, 28, 4, 128, 18944, 152064),
    "Qwen2.5-14B": (5120, 40, 8, 128, 13824, 152064),
    "Qwen2.5-32B": (5120, 40, 8, 128, 27648, 152064),
    "Qwen3-0.6B": (1024, 16, 8, 128, 3072, 151936),
    "Qwen3-1.7B": (2048, 16, 8, 128, 6144, 151936),
    "Qwen3-4B": (2560, 32, 8, 128, 9728, 151936),
    "Qwen3-8B": (4096, 32, 8, 128, 12288, 151936),
    "Qwen3-14B": (5120, 40, 8, 128, 17408, 151936),
    "Qwen3-32B": (5120, 64, 8, 128, 25600, 151936),
    "SmolLM2-360M": (960, 15, 5, 64, 2560, 49152),
}


def weights_of(model: str) -> dict[str, Weights]:
    """A layer's weights and the LM head, by their names."""
    width, heads, kv_heads, head_width, mlp, vocabulary = MODELS[model]
    return {
        "qkv": Weights(width, (heads + 2 * kv_heads) * head_width),
        "out": Weights(heads * head_width, width, split=True),
        "gate_up": Weights(width, mlp, gated=True),
        "down": Weights(mlp, width, split=True),
        "head": Weights(width, vocabulary, head=True),
    }


PUBLISHED = sorted({weights for model in MODELS for weights in weights_of(model).values()})
"""All of them, each once."""
SHARES = [
    Weights(256, 352, gated=True),
    Weights(352, 256),
    Weights(4096, 1376, gated=True),
    Weights(1376, 4096),
]
"""Of MLPs on a mesh: the demo's cut by 2, Vicuna-7B's by 8. Blocks of 64 columns do not fit."""
EXTRA_HEADS = [Weights(2048, 262144, head=True), Weights(2880, 201088, head=True)]


EVERY_KIND = [
    *SHARES,
    Weights(256, 512),
    Weights(256, 256, split=True),
    Weights(256, 704, gated=True),
    Weights(3584, 4608),
    Weights(896, 1152),
    Weights(4096, 4096, split=True),
    Weights(17408, 5120, split=True),
    Weights(3584, 18944, gated=True),
    Weights(2048, 8192, gated=True),
    Weights(2048, 32008, head=True),
    Weights(896, 151936, head=True),
]
"""Some that differ in their tiles, their edges and the turns of a program."""


def drawn(
    weights: Weights, dtype: str, rows: int = 200
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The first of some random rows, weights, and a bias where one may be."""
    sizes = weights.contracted, *[2] * weights.gated, weights.columns
    x = normal(0, 600, weights.contracted, dtype=dtype)[:rows]
    other = normal(1, *(sizes[::-1] if weights.head else sizes), dtype=dtype) / 16
    plain = not (weights.gated or weights.split or weights.head)
    return x, other, normal(2, weights.columns, dtype=dtype) if plain else None


def product(weights: Weights, x: jax.Array, other: jax.Array, bias: jax.Array | None) -> jax.Array:
    """The Hopper kernel's result, its partials not added up."""
    if weights.head:
        return ordered.HEAD_MATMUL.named("mosaic")(x, other)
    options = dict(gated=weights.gated, split=weights.split)
    return ordered.MATMUL.named("mosaic")(x, other, bias, **options)
