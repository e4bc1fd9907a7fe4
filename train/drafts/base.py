"""What a kind of draft brings to the trainer, and what the trainer gives it.

The trainer (pipeline, step, loop, checkpoints, metrics, benchmark) knows no kind by name. A kind
has

- *settings* in :mod:`train.drafts.kinds`, a subclass of :class:`train.config.DraftSettings`: the
  section ``draft`` of a configuration, every field with its range;
- a file of :mod:`train.drafts` with ``begin`` and a :class:`DraftTrainer`: it gives the
  :class:`train.step.Objective` of each stage, and exports the draft.

The objective says what the draft reads of the frozen target (:func:`train.views.target_view` gives
the keys and values of its last layer, and the residual stream of any layers), the loss, the
simulated acceptance (:mod:`train.acceptance`) and the operations that a token needs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int, PyTree

from longspec_jax.config.target import TargetConfig

from ..config import StageConfig
from ..step import Objective
from ..views import Reads


@dataclass(frozen=True, eq=False)
class TrainContext:
    """What a draft is begun with."""

    target: TargetConfig
    params: PyTree
    """The frozen target's parameters, spread over the mesh."""
    stages: tuple[StageConfig, ...]
    """All stages that the draft is trained in."""
    seed: int
    dtype: str
    """Of parameters and activations in a step, and of what is saved."""
    mesh: Mesh
    count_tokens: Callable[[], Int[np.ndarray, " V"]]
    """How often every token of the target is to be predicted in the data of all stages. A kind that
    does not call it costs no pass over the data."""


class InitialDraft(NamedTuple):
    """A draft before its first step."""

    trainer: "DraftTrainer"
    frozen: PyTree
    """What the objective reads and does not change: the target's parameters, and more."""
    params: Mapping[str, Any] | None
    """Parameters to start from; None for those of the objective's ``initialize``."""


class DraftTrainer(Protocol):
    """A draft for a target, as the pipeline trains it."""

    def objective(self, stage: StageConfig, loss_chunk: int, mlp_chunk: int) -> Objective:
        """What a stage learns.

        Args:
          stage: the stage.
          loss_chunk: most tokens of a device whose logits over the target's vocabulary exist at
            once.
          mlp_chunk: most tokens of a device whose MLP activations exist at once; 0: all.

        Raises:
          ValueError: for a stage that this draft cannot be trained in.
        """
        ...

    def reads(self, stage: StageConfig) -> Reads | None:
        """What a stage learns from of the target's forward, which may have been stored.

        None where the target runs at positions that every step draws anew.
        """
        ...

    def save(self, folder: Path, params: PyTree) -> None:
        """Write the draft in the format that its drafter loads.

        Args:
          folder: made if absent.
          params: the parameters, whole and of the run's dtype.
        """
        ...


def refuse_offsets(stage: StageConfig, draft: str) -> None:
    """Refuse a stage of anchor-offset positions for a draft that attends only to distances.

    Raises:
      ValueError: names the stage.
    """
    if stage.max_offset:
        raise ValueError(
            f"stage {stage.name}: max_offset={stage.max_offset} is for drafts that read the "
            f"target's keys; {draft} attends only to distances: set "
            f"--config.stages.{stage.name}.max_offset=0"
        )
