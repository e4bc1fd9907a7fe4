"""Sinks and recent tokens: every length by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.drafters.retrieval.selection import SinksAndRecent
from tests.kit import each_row


def counted(selection: SinksAndRecent, length: int, capacity: int = 16) -> list[int]:
    """How many spans hold each slot."""
    found = selection(jnp.array([length]))
    slot = np.arange(capacity)[:, None]
    inside = (slot >= np.asarray(found.start)[0]) & (slot < np.asarray(found.stop)[0])
    return inside.sum(axis=1).tolist()


@each_row(("sinks", "recent"), [(0, 3), (2, 3), (5, 1), (7, 9)])
def test_no_slot_is_seen_twice_and_none_beyond_the_length(sinks: int, recent: int) -> None:
    """Twice would give it twice its weight."""
    for length in range(15):
        wanted = [int(s < length and (s < sinks or s >= length - recent)) for s in range(16)]
        assert counted(SinksAndRecent(sinks, recent), length) == wanted


def test_a_selection_without_recent_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="recent=0 at least 1"):
        SinksAndRecent(4, 0)
