"""Blocks in whole training rows, of drafts that propose a block in one forward.

A block begins at an *anchor*, the token that would be pending there. It sees what a round would
see: what its kind reads of the text before the anchor, nothing of the text from the anchor on but
the anchor itself. A row has one block in every ``anchor_every`` tokens, at a random place among
them: all places are equally likely, anchors ascend, and a chunk of blocks reads a stretch of the
row whose length is known at trace time.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from longspec_jax.axes import Array

from ..acceptance import count_hits, counted_tokens


def drawn_anchors(
    key: Array, rows: tuple[int, int], length: int, every: int
) -> Int[Array, "A B M"]:
    """One place in every ``every`` tokens; the last stretch may be shorter."""
    starts = np.arange(0, length, every)
    sizes = np.minimum(every, length - starts)
    return jax.random.randint(key, (*rows, len(starts)), 0, sizes) + jnp.asarray(starts)


def even_anchors(rows: int, length: int, every: int) -> Int[Array, "B M"]:
    """The first of every ``every`` tokens, for measures that draw nothing."""
    return jnp.broadcast_to(jnp.arange(0, length, every), (rows, -(-length // every)))


def places(anchors: Int[Array, "B M"], block: int) -> Int[Array, "B slots"]:
    """The index in its row of every slot's token, blocks one after the other.

    May be beyond the row.
    """
    index = anchors[:, :, None] + jnp.arange(block)
    return index.reshape(len(anchors), -1)


def slot_weights(slots: int, every: int, decay: float) -> Float[Array, " slots"]:
    """How much every slot of a block counts: ``exp(-j / decay)``, the first one most.

    A block's sum is ``every``, so that a row's sum is that of its tokens.
    """
    decays = np.exp(-np.arange(slots) / decay)
    return jnp.asarray(every * decays / decays.sum(), jnp.float32)


def slot_hits(
    hidden: Float[Array, "B M slots D"],
    head: Float[Array, "V D"],
    wanted: Float[Array, "B M slots W"],
    target_head: Float[Array, "V W"],
    weights: Float[Array, "B M slots"],
    *,
    chunk: int,
) -> tuple[Array, Array, Array]:
    """What :func:`train.acceptance.agreement_report` reads; slot ``j`` is shift ``j + 1``.

    Blocks count that are learned whole.

    Args:
      hidden: what the draft's LM head reads.
      head: the draft's.
      wanted: the target's final hidden state that predicts the same token.
      target_head: the target's.
      weights: of the slots, 0 where nothing is learned.
      chunk: most blocks whose logits exist at once.
    """
    counted = counted_tokens((weights > 0).all(axis=2).astype(jnp.float32))

    def of_slot(slot: tuple[Array, Array]) -> tuple[Array, Array]:
        found, sought = slot
        return count_hits(found, head, sought, target_head, counted, chunk=chunk)

    by_slot = (jnp.moveaxis(each, 2, 0) for each in (hidden, wanted))
    return *jax.lax.map(of_slot, tuple(by_slot)), jnp.sum(counted, (1, 2))
