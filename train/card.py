"""The model card of a run: what was trained, on what, how, and under which licences."""

import json
import platform
import shlex
import sys
from pathlib import Path

import jax

from train.config import RunConfig

_HEAD = """---
license: mit
library_name: longspec_jax
---

# {title}

Trained by `{command}` (seed {seed}, {dtype}) on {device} with jax {jax}, Python {python};
{minutes:.1f} minutes of wall time in the last call of the command.

- `target/`: the target model and its tokenizer, in Hugging Face format.
- `draft/`: the LongSpec draft, in the format of the LongSpec release.
- `config.json`: the whole configuration; `metrics.jsonl`: every measurement.

## Last measurements

{measures}
"""

_SOURCES = """
## Training data

Source code and documentation of the Python distributions below, as installed, each under the licence
its metadata declare. Files that looked generated, minified or like data were dropped, exact duplicates
too. Distributions marked *held out* were not trained on, nor were files that repeat their text.

| distribution | version | licence | files | bytes | |
|---|---|---|---:|---:|---|
{rows}
"""


def write_card(workdir: Path, config: RunConfig, *, seconds: float) -> None:
    """Write ``README.md``, ``config.json`` having been written before."""
    card = _HEAD.format(
        title=config.title,
        command=shlex.join(["python", "-m", "train.run", *sys.argv[1:]]),
        seed=config.seed,
        dtype=config.dtype,
        device=f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        jax=jax.__version__,
        python=platform.python_version(),
        minutes=seconds / 60,
        measures=_measures(workdir / "metrics.jsonl"),
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


def _measures(path: Path) -> str:
    """The last held-out figures of every stage."""
    last: dict[str, dict[str, float]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        stage = last.setdefault(record.pop("stage"), {})
        stage.update(record)
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
        f"- {stage}: " + ", ".join(f"{name} {values[name]}" for name in shown if name in values)
        for stage, values in last.items()
    ]
    return "\n".join(lines)
