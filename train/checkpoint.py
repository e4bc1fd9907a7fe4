"""Checkpoints of one stage: masters, optimiser and where the run stands.

Everything else a step needs (order of the data, randomness, learning rate) is a function of seed,
step and elapsed time, so that a resumed run repeats the uninterrupted one bit for bit.
"""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from .step import TrainState


class Checkpoints:
    """The checkpoints of a stage in a folder; the newest few are kept."""

    def __init__(self, folder: Path, max_to_keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=max_to_keep, create=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(self, step: int, state: TrainState, meta: dict[str, Any]) -> None:
        """Save in the background; a step already saved is saved again only if its meta changed."""
        if step == self._manager.latest_step():
            self._manager.wait_until_finished()
            self._manager.delete(step)
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)
            ),
            force=True,
        )

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
        """The newest state, laid out like the given one (abstract or real), and its meta."""
        step = self._manager.latest_step()
        if step is None:
            return None
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like
        )
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract), meta=ocp.args.JsonRestore()
            ),
        )
        return restored["state"], restored["meta"]

    def close(self) -> None:
        """Wait for saves under way."""
        self._manager.wait_until_finished()
        self._manager.close()
