"""Blocks that were chosen, and serve for several rounds.

What a text is about changes slowly. Which blocks were chosen is kept, not what lies in them: they
are read again in every round, and behind them all that was committed since, so that the reading
never has a hole before the pending token.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Int

from longspec_jax.axes import Array, Leaf, Lengths


@struct.dataclass
class Kept:
    """What was last chosen in each row."""

    asked: Any
    """What the next choice is made by: the state of who chooses."""
    blocks: Leaf[Int[Array, "B *heads k"]]
    """As the table had them: the row's last one behind all others that it had."""
    length: Leaf[Lengths]
    """Committed tokens when they were chosen; 0 for a row that has not chosen yet."""
    rounds: Leaf[Int[Array, " B"]]
    """Rounds since then, each with a full pass."""


def nothing_kept(asked: Any, batch: int, *sizes: int) -> Kept:
    """Rows that have chosen nothing yet; ``sizes`` are those of a row's blocks."""
    none = jnp.zeros((batch,), jnp.int32)
    return Kept(asked, jnp.zeros((batch, *sizes), jnp.int32), none, none)


def due(kept: Kept, refresh: int, end: Lengths, block: int, behind: int) -> Bool[Array, " B"]:
    """Rows in which it is time to choose: after so many rounds, or where there is no more room.

    Args:
      kept: what they chose last.
      refresh: rounds from one choice to the next.
      end: the most tokens that may be read before the next look.
      block: slots of a block.
      behind: blocks that there is room for behind the choice.
    """
    held = (-(-kept.length // block) + behind) * block
    return (kept.length == 0) | (kept.rounds + 1 >= refresh) | (end > held)


def renewed(
    kept: Kept,
    rows: Bool[Array, " B"],
    length: Lengths,
    choose: Callable[[Any], Int[Array, "B *heads k"]],
) -> Kept:
    """What is kept for a round.

    Args:
      kept: before it.
      rows: those that choose anew; if there are none, nothing is computed.
      length: their committed tokens.
      choose: the blocks by what is asked, of no other shape than those that are kept.
    """

    def anew(old: Kept) -> Kept:
        found = choose(old.asked)
        lead = rows.reshape(-1, *[1] * (found.ndim - 1))
        blocks = jnp.where(lead, found, old.blocks)
        return replace(old, blocks=blocks, length=jnp.where(rows, length, old.length))

    latest: Kept = jax.lax.cond(rows.any(), anew, lambda old: old, kept)
    return replace(latest, rounds=jnp.where(rows, 0, latest.rounds + 1))
