"""The model card of a run: what was trained, on what, how, and under which licences."""

import json
import platform
from pathlib import Path

import jax

from .config import RunConfig
from .metrics import read_records

_HEAD = """\
---
library_name: longspec_jax
---

# {title}

Trained from the configuration {configuration} (seed {seed}, {dtype}) on {device} with jax {jax},
Python {python}: {minutes:.1f} minutes of training in all calls together, without compilation,
measurements and saves.

{folders}- `config.json`: the whole configuration, overrides applied; `metrics.jsonl`: every
  measurement.

## Last measurements

{measures}
"""

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
_DRAFT = "- `draft/`: the draft, of the kind {kind}.\n"


def write_card(workdir: Path, config: RunConfig, name: str) -> None:
    """Write ``README.md`` for a run of the configuration of this name."""
    last = _last_records(workdir / "metrics.jsonl")
    card = _HEAD.format(
        title=config.title,
        configuration=f"`{name}`" if name else "`config.json`",
        seed=config.seed,
        dtype=config.dtype,
        device=f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        jax=jax.__version__,
        python=platform.python_version(),
        # Every stage counts its own time, over all calls.
        minutes=sum(stage.get("elapsed", 0.0) for stage in last.values()) / 60,
        folders=(_TARGET if config.pretraining else "")
        + (_DRAFT.format(kind=config.draft.kind) if config.stages else ""),
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


def _last_records(path: Path) -> dict[str, dict[str, float]]:
    """The last figures of every kind, by stage."""
    last: dict[str, dict[str, float]] = {}
    for record in read_records(path):
        # A null replaces an earlier value.
        last.setdefault(record.pop("stage"), {}).update(record)
    return last


def _measures(last: dict[str, dict[str, float]]) -> str:
    """The last held-out figures of every stage."""
    named = "step loss target_loss heldout_loss tau_chain tau_chain_far tau_top4".split()
    lines = [
        f"- {stage}: "
        + ", ".join(f"{name} {values[name]}" for name in named if values.get(name) is not None)
        for stage, values in last.items()
    ]
    return "\n".join(lines)
