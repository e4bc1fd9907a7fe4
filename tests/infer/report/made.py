"""Runs made by hand, whose figures can be computed in the head."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from infer.eval.records import (
    SCHEMA,
    Header,
    Run,
    SampleRecord,
    Setting,
    SkippedSample,
    Writer,
    write_header,
)
from infer.report.frame import blocks_of, frame_of

HOSTILE = "</script><script>document.title = 'owned'</script><b onmouseover=alert(1)>&amp;"
"""What a model may say."""
SETTINGS = {
    "plain": Setting(drafter=None, tree=None, nodes=1, options={}),
    "longspec-tree": Setting(drafter="demo", tree="2,2", nodes=5, options={}),
    "ngram": Setting(drafter="ngram", tree="chain:4", nodes=5, options={}),
}


def record(
    method: str = "plain",
    sample: str = "0",
    emitted: Sequence[int] = (1, 1, 1, 1),
    seconds: float = 1.0,
    **changed: Any,
) -> SampleRecord:
    """A text of one more token than its rounds emit; the last of each round is the bonus."""
    new_tokens = 1 + sum(emitted)
    values: dict[str, Any] = {
        "task": "copying",
        "sample": sample,
        "method": method,
        "temperature": 0.0,
        "seed": 0,
        "setting": SETTINGS.get(method, SETTINGS["ngram"]),
        "batch": 1,
        "prompt_tokens": 1000,
        "new_tokens": new_tokens,
        "target_passes": len(emitted),
        "emitted_by_round": tuple(emitted),
        "accepted_by_round": tuple(count - 1 for count in emitted),
        "prefill_s": 2.0,
        "decode_s": seconds,
        "compile_s": 5.0,
        "tokens": tuple(range(new_tokens)),
        "text": "word " * new_tokens,
        "references": (),
        "identical_to_plain": None if method == "plain" else True,
        "divergence": None,
        "ended": "length",
        **changed,
    }
    names = ("task", "sample", "method", "temperature", "seed")
    values.setdefault("call", " ".join(str(values[name]) for name in names))
    return SampleRecord(**values)


def run(
    records: Sequence[SampleRecord],
    name: str = "a",
    skipped: Sequence[SkippedSample] = (),
    torn: int = 0,
    **changed: Any,
) -> Run:
    """A run whose header says what its records hold, unless it is told otherwise."""
    methods = dict.fromkeys(each.method for each in records)
    values: dict[str, Any] = {
        "schema": SCHEMA,
        "provenance": {"device": "made up", "commit": "0" * 40, "date": "2026-11-22T12:00:00"},
        "command": "python -m infer.eval --task=copying",
        "target": "demo",
        "dtype": "float32",
        "tasks": tuple(dict.fromkeys(each.task for each in records)),
        "methods": {method: SETTINGS[method] for method in methods},
        "temperatures": tuple(sorted({each.temperature for each in records})),
        "seeds": (0,),
        "batch": 1,
        "options": {"samples": 8},
        "definitions": {},
    }
    given: Mapping[str, Any] = {**values, **changed}
    return Run(name, Header(**given), tuple(records), tuple(skipped), torn)


def framed(records: Sequence[SampleRecord]) -> pd.DataFrame:
    """The records of one run as a frame."""
    return frame_of(blocks_of([run(records)]))


def write(made: Run, folder: Path) -> Path:
    """The run as a folder of files."""
    folder.mkdir()
    write_header(folder, made.header)
    writer = Writer(folder)
    writer.add(made.samples)
    writer.add(made.skipped)
    return folder
