"""What makes a resumed run the same run, by name, so that a resume of another one is refused.

Everything in the configuration counts but what changes neither the batches nor the mathematics:
where things lie, how often something is written, and how the work is cut for the devices, so that a
run may be resumed on other ones. Data and models count by their content.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longspec_jax.config import TargetConfig
from longspec_jax.weights.hub import local_folder

from .config import RunConfig, StageConfig
from .data.fingerprint import files_digest

Fingerprint = dict[str, Any]
"""A value that JSON can hold for every name; two runs are the same if all are equal."""

_NOT_COUNTED = (
    "target", "revision", "export", "title", "loss_chunk", "mlp_chunk",
    "target_loss_every", "log_every", "save_every",
    "accept_every", "accept_rows", "accept_seq_len", "max_to_keep", "mesh", "stages", "pretraining",
    "log", "profile_at", "profile_steps",
)  # fmt: skip
"""Fields of a run that have no say, or have it through the stage, the rows and the models."""
_NOT_COUNTED_IN = {
    "data": ("files", "hub", "split", "stream", "corpus", "max_bad_rows"), "draft": ("init",),
}  # fmt: skip
"""Those of its sections, most of which say where something lies whose content counts."""
_MODEL_FILES = ("config.json", "*.safetensors", "*.bin", "*.pth")


def draft_settings(config: RunConfig, stage: StageConfig) -> Fingerprint:
    """What a configuration decides of a draft's stage, by dotted names as they are typed."""
    kept = _settings(config, stage)
    if config.draft.per_row:  # Every row has draws of its own, however many go together.
        del kept["stages"][stage.name]["accumulation"]
    return _typed(kept)


def target_settings(config: RunConfig, shape: TargetConfig, stage: StageConfig) -> Fingerprint:
    """What a configuration decides of a stage that trains a target of this shape."""
    kept = _settings(config, stage)
    del kept["draft"], kept["stages"][stage.name]["accumulation"]
    stages = kept.pop("stages")
    return _typed({**kept, "pretraining": {"shape": dataclasses.asdict(shape), "stages": stages}})


def model_digest(source: str | Path, revision: str | None = None) -> str:
    """What a model's files hold; of large ones, evenly spaced parts."""
    folder = local_folder(source, revision)
    found = {path for pattern in _MODEL_FILES for path in folder.glob(pattern)}
    return files_digest(sorted(found))


def check_same_run(saved: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Refuse to go on from a checkpoint of another run.

    Args:
      saved: the fingerprint in the checkpoint.
      now: that of this run.
      folder: the checkpoint, for the message.

    Raises:
      ValueError: if they differ.
    """
    # What is compared went through JSON, in which a tuple is a list.
    now = json.loads(json.dumps(now))
    names = sorted(name for name in saved.keys() | now.keys() if saved.get(name) != now.get(name))
    if names:
        changes = ", ".join(
            f"{name}={_shown(now.get(name))} (was {_shown(saved.get(name))})" for name in names
        )
        raise ValueError(
            f"the checkpoint {folder} is of another run: {changes}; restore what changed to go on "
            "from it, or begin anew with another --workdir"
        )


def _settings(config: RunConfig, stage: StageConfig) -> dict[str, Any]:
    """All fields that count, the stage's own under its name."""
    values = dataclasses.asdict(config)
    kept = {name: value for name, value in values.items() if name not in _NOT_COUNTED}
    for section, names in _NOT_COUNTED_IN.items():
        kept[section] = {key: kept[section][key] for key in kept[section] if key not in names}
    fields = dataclasses.asdict(stage)
    return {**kept, "stages": {fields.pop("name"): fields}}


def _typed(kept: Mapping[str, Any]) -> Fingerprint:
    return {f"--config.{name}": value for name, value in _flat(kept).items()}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Fingerprint:
    flat: Fingerprint = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def _shown(value: Any) -> str:
    return "absent" if value is None else str(value)
