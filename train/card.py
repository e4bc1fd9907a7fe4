"""The model card of a run: what was trained, on what, how, and under which licences."""

import json
import platform
import shlex
from collections.abc import Sequence
from pathlib import Path

import jax

from .arguments import is_bundled
from .config import RunConfig
from .metrics import read_records

_FRONT = """---
license: mit
library_name: longspec_jax
---
"""
_HEAD = (
    _FRONT
    + """

# {title}

Trained by `{command}` (seed {seed}, {dtype}) on {device} with jax {jax}, Python {python}:
{minutes:.1f} minutes of training in all calls of the command together (compilation, measuring and
saving apart).

{folders}- `config.json`: the whole configuration; `metrics.jsonl`: every measurement.

## Last measurements

{measures}
"""
)

_SOURCES = """
## Training data

Source code and documentation of the Python distributions below, as installed, each under the
licence its metadata declare. Files that looked generated, minified or like data were dropped, exact
duplicates too. Distributions marked *held out* were not trained on, nor were files that repeat
their text.

| distribution | version | licence | files | bytes | |
|---|---|---|---:|---:|---|
{rows}
"""


_TARGET = "- `target/`: the model and its tokenizer, in Hugging Face format.\n"
_DRAFT = "- `draft/`: the LongSpec draft, in the format of the LongSpec release.\n"


def write_card(workdir: Path, config: RunConfig, command: str) -> None:
    """Write ``README.md``, ``config.json`` having been written before."""
    last = _last_records(workdir / "metrics.jsonl")
    card = _HEAD.format(
        title=config.title,
        command=command or "train.pipeline.train",
        seed=config.seed,
        dtype=config.dtype,
        device=f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        jax=jax.__version__,
        python=platform.python_version(),
        # Every stage counts its own time, over all calls.
        minutes=sum(stage.get("elapsed", 0.0) for stage in last.values()) / 60,
        folders=(_TARGET if config.pretraining else "") + (_DRAFT if config.stages else ""),
        measures=_measures(last),
    )
    sources = workdir / "corpus" / "sources.json"
    if sources.is_file():
        rows = "\n".join(
            f"| {s['name']} | {s['version']} | {s['licence']} | {s['files']} | {s['bytes']} | "
            f"{'held out' if s['held_out'] else ''} |"
            for s in json.loads(sources.read_text())
        )
        card += _SOURCES.format(rows=rows)
    (workdir / "README.md").write_text(card)


def is_card(path: Path) -> bool:
    """Whether a file begins as the cards do that :func:`write_card` writes."""
    return path.is_file() and path.read_bytes().startswith(_FRONT.encode())


def portable_command(command: str, arguments: Sequence[str]) -> str:
    """The training command without what only its author's machine knows: folders and hosts.

    Args:
      command: how it was called.
      arguments: what it was given.
    """
    kept = []
    for argument in _joined(arguments):
        name, _, value = argument.partition("=")
        match name.lstrip("-"):
            case "config":
                argument = f"{name}={_portable_config(value)}"
            case "workdir" | "config.export" | "coordinator" | "process" | "processes":
                continue
            case _ if value.startswith(("/", "~", ".")) or Path(value).exists():
                argument = f"{name}={Path(value).name or 'FOLDER'}" if value else argument
        kept.append(argument)
    return shlex.join([*command.split(), *kept])


def _joined(arguments: Sequence[str]) -> list[str]:
    """``--flag value`` as ``--flag=value``; a training command takes no other plain words."""
    words: list[str] = []
    for argument in arguments:
        if words and "=" not in words[-1] and not argument.startswith("-"):
            words[-1] += f"={argument}"
        else:
            words.append(argument)
    return words


def _portable_config(value: str) -> str:
    """A configuration as another machine finds it: by name, or by file name."""
    file, colon, variant = value.partition(":")
    path = Path(file)
    if path.parent.name == "configs" and is_bundled(path.name):
        return f"configs/{path.name}{colon}{variant}"
    return path.name + colon + variant


def _last_records(path: Path) -> dict[str, dict[str, float]]:
    """The last figures of every kind, by stage."""
    last: dict[str, dict[str, float]] = {}
    for record in read_records(path):
        # What could not be measured last is not what was measured before.
        last.setdefault(record.pop("stage"), {}).update(record)
    return last


def _measures(last: dict[str, dict[str, float]]) -> str:
    """The last held-out figures of every stage."""
    shown = (
        "step",
        "loss",
        "target_loss",
        "heldout_loss",
        "tau_chain",
        "tau_chain_far",
        "tau_top4",
    )
    lines = [
        f"- {stage}: "
        + ", ".join(f"{name} {values[name]}" for name in shown if values.get(name) is not None)
        for stage, values in last.items()
    ]
    return "\n".join(lines)
