"""Everything that is measured of one draft, as JSON values with one number for every row."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from longspec_jax import LongSpec
from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.longspec.load import LongSpecDraft

from ..records import read_records
from .decoding import decoded_acceptance
from .scores import DraftScores, score_draft
from .tokens import copy_distance, cut

TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True)
class Setting:
    """What drafts are measured on."""

    rows: np.ndarray
    """Held-out tokens ``[R, T]``, as long as the longest context."""
    begin: int | None
    """The first token of every row, after a cut too."""
    contexts: tuple[int, ...]
    """Tokens that are left of a row; ascending."""
    last: int
    """Tokens at the end of every row that are scored, whatever the context."""
    shifts: int
    """Distances from the target's last key that are scored."""
    near: int
    """Copies from further back than this are far."""
    tree: str
    new_tokens: int


def measured_scores(setting: Setting, target: Target, draft: LongSpecDraft) -> dict[str, Any]:
    """Loss and agreement by context and shift, and over new and copied tokens."""
    found: dict[str, Any] = {"contexts": {}}
    for context in setting.contexts:
        rows = cut(setting.rows, context, setting.begin)
        longest = context == setting.contexts[-1]
        last = min(16 * setting.last, context // 2) if longest else setting.last
        each = score_draft(target, draft, rows, last=last, shifts=setting.shifts)
        end = slice(-setting.last, None)
        found["contexts"][str(context)] = {
            "loss": each.loss[..., end].mean(axis=-1).tolist(),
            "agreement": each.agrees[..., end].mean(axis=-1).tolist(),
            "target_loss": each.target_loss[..., end].mean(axis=-1).tolist(),
        }
        if longest:
            found["copies"] = _by_copy(each, rows, setting.near)
    return found


def _by_copy(scores: DraftScores, rows: np.ndarray, near: int) -> dict[str, Any]:
    """Sums over tokens that are new, copied from nearby and copied from far back."""
    last = scores.loss.shape[-1]
    distance = np.stack([copy_distance(row)[-last:] for row in rows])
    kinds = {
        "new": distance == 0,
        "near": (distance > 0) & (distance <= near),
        "far": distance > near,
    }
    return {
        kind: {
            "tokens": int(chosen.sum()),
            "loss": (scores.loss * chosen).sum(axis=(1, 2)).tolist(),
            "agreement": (scores.agrees & chosen).sum(axis=(1, 2)).tolist(),
            "target_loss": float((scores.target_loss * chosen).sum()),
        }
        for kind, chosen in kinds.items()
    }


def measured_decoding(setting: Setting, model: LongSpec) -> dict[str, Any]:
    """Counts of real decoding by temperature and context."""
    # Cuts of all lengths share the programs of the longest.
    model = replace(model, expected_tokens=setting.contexts[-1] + setting.new_tokens)
    found: dict[str, Any] = {str(temperature): {} for temperature in TEMPERATURES}
    for context in setting.contexts:
        counts = decoded_acceptance(
            model,
            cut(setting.rows, context, setting.begin),
            tree=setting.tree,
            new_tokens=setting.new_tokens,
            temperatures=TEMPERATURES,
        )
        for temperature, each in zip(TEMPERATURES, counts, strict=True):
            found[str(temperature)][str(context)] = each
    return found


def training_curve(log: Path, stages: Sequence[str] = ("draft_short", "draft_long")) -> Any:
    """Losses by step of a run's stages: the draft's cross-entropy, and the target's where told.

    A rollout has no cross-entropy over all tokens; its own loss stands in its place.
    """
    records = [record for record in read_records(log) if "loss" in record]
    found: dict[str, dict[str, list[float]]] = {}
    for stage in stages:
        own = [record for record in records if record["stage"] == stage]
        found[stage] = {
            "loss": [record.get("cross_entropy", record["loss"]) for record in own],
            "target_loss": [record["target_loss"] for record in own if "target_loss" in record],
        }
    return found
