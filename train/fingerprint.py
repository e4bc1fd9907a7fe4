"""What makes a resumed run the same run, by name, so that a resume of another one is refused.

Everything in the configuration counts but what changes neither the batches nor the mathematics:
where things lie, how often something is written, and how the work is cut for the devices, so that a
run may be resumed on other ones. Data and models count by their content.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longspec_jax.weights.hub import local_folder

from .config import RunConfig, StageConfig

Fingerprint = dict[str, Any]
"""A value that JSON can hold for every name; two runs are the same if all are equal."""

_NOT_COUNTED = (
    "target", "revision", "export", "title", "loss_chunk", "log_every", "save_every",
    "accept_every", "accept_rows", "accept_seq_len", "max_to_keep", "mesh", "data", "stages",
    "pretraining",
)  # fmt: skip
"""Fields of a run that have no say, or have it through the stage, the data and the models."""
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16


def settings_of(config: RunConfig, stage: StageConfig) -> Fingerprint:
    """What a configuration decides of a stage, by dotted names as they are typed."""
    values = dataclasses.asdict(config)
    kept = {name: value for name, value in values.items() if name not in _NOT_COUNTED}
    fields = dataclasses.asdict(stage)
    if config.draft.per_row:  # All draws are of single rows then, however many go together.
        del fields["accumulation"]
    name = fields.pop("name")
    kept["draft"] = {key: value for key, value in kept["draft"].items() if key != "init"}
    return {
        f"--config.{key}": value for key, value in _flat({**kept, "stages": {name: fields}}).items()
    }


def model_digest(source: str | Path, revision: str | None = None) -> str:
    """What a model's files hold, by their names, sizes and samples of a few parts.

    Samples are spread over every file, because gigabytes of weights would take a minute to read.
    """
    folder = local_folder(source, revision)
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*")):
        if path.suffix not in (".json", ".safetensors", ".model", ".bin", ".pth"):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for start in _sampled(size):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


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
            f"{name}={shown(now.get(name))} (was {shown(saved.get(name))})" for name in names
        )
        raise ValueError(
            f"the checkpoint {folder} is of another run: {changes}; restore what changed to go on "
            "from it, or begin anew with another --workdir"
        )


def shown(value: Any) -> str:
    """A value as it is typed, or what stands for one that is not there."""
    return "absent" if value is None else str(value)


def _sampled(size: int) -> range:
    """Offsets of the samples of a file; those of a small one cover it."""
    return range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Fingerprint:
    flat: Fingerprint = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
