"""Records: what is written is what is read, and what cannot be is refused with its line."""

import dataclasses
import json
import math
import resource
import signal
from pathlib import Path

import pytest

from infer.eval import records
from infer.eval.records import (
    SAMPLES,
    Divergence,
    SampleRecord,
    SkippedSample,
    Writer,
    acceptance_length,
    decode_seconds,
    differences,
    read,
    tokens_per_second,
    write_header,
)
from tests.infer.report.made import record, run

RECORD = record(
    "longspec-tree",
    "7",
    (3, 1, 3),
    seconds=2.0,
    task="qmsum",
    call="first",
    batch=2,
    accepted_by_round=(2, 0, 3),
    text="a \u2028 line",
    references=("x", "y"),
    identical_to_plain=False,
    divergence=Divergence(2, None),
    ended="eos",
)
HEADER = run([RECORD], batch=2).header


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_header(tmp_path, HEADER)
    Writer(tmp_path).add([RECORD])
    return tmp_path


def another(**changes) -> SampleRecord:
    return dataclasses.replace(RECORD, **changes)


def test_what_is_written_is_read(folder: Path) -> None:
    skipped = SkippedSample("qmsum", "8", 3, "too short")
    Writer(folder).add([skipped])
    found = read(folder)
    assert found == records.Run(folder.name, HEADER, (RECORD,), (skipped,), 0)
    assert not differences(found.header, HEADER)


def test_counts_follow_one_definition() -> None:
    plain = another(target_passes=7, emitted_by_round=(1,) * 7, call="second", decode_s=1.0)
    ended = another(new_tokens=1, target_passes=0, emitted_by_round=(), call="third", decode_s=0.0)
    assert RECORD.decode_tokens == plain.decode_tokens == 7 and ended.decode_tokens == 0
    assert acceptance_length([RECORD, plain, ended]) == 14 / 10
    row = another(sample="8")  # Of the same call: its seconds are counted once.
    assert decode_seconds([RECORD, row, plain]) == 3.0
    assert tokens_per_second([RECORD, row]) == 14 / 2
    assert math.isnan(acceptance_length([ended])) and math.isnan(tokens_per_second([]))


def test_a_torn_last_line_counts_for_nothing(folder: Path) -> None:
    path = folder / SAMPLES
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    found = read(folder)
    assert found.samples == (RECORD,) and found.torn == len(whole) // 2
    Writer(folder).add([another(sample="8")])
    assert [record.sample for record in read(folder).samples] == ["7", "8"]


def test_a_call_is_written_whole_or_not_at_all(folder: Path, monkeypatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        Writer(folder).add([another(sample="8"), another(sample="9")])
    assert read(folder).samples == (RECORD,)


def test_a_partial_write_is_continued(folder: Path) -> None:
    """As one does on a disk that fills up; here a limit on the size of files."""
    before = (folder / SAMPLES).stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before + 100, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            Writer(folder).add([another(sample="8"), another(sample="9")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert read(folder).samples == (RECORD,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"new_tokens": "8"}, "line 1: new_tokens='8' must be a whole number from 0"),
        ({"new_tokens": True}, "new_tokens=True must be"),
        ({"decode_s": -0.5}, "line 1: decode_s=-0.5 must be 0 or more"),
        ({"prefill_s": math.nan}, "prefill_s=nan must be 0 or more"),
        ({"target_passes": -1}, "target_passes=-1 must be"),
        ({"ended": "stop"}, "ended='stop' must be one of eos, length"),
        ({"tokens": [1, "2"]}, "tokens=.* must be a list of whole numbers"),
        ({"colour": 1}, "line 1: unknown option 'colour'"),
        ({"setting": {"drafter": None}}, "line 1: setting lacks tree, nodes, options"),
    ],
)
def test_what_is_no_record_is_refused(folder: Path, change: dict, words: str) -> None:
    path = folder / SAMPLES
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}) + "\n")
    with pytest.raises(ValueError, match=words):
        read(folder)


def test_files_that_are_damaged_say_what_to_do(folder: Path) -> None:
    path = folder / SAMPLES
    line = path.read_text()
    path.write_text(line + "{broken\n" + line)
    with pytest.raises(ValueError, match="line 2 is not JSON .* remove the line"):
        read(folder)
    path.write_text(line * 2)
    with pytest.raises(ValueError, match="count it twice; remove one of the two lines"):
        read(folder)
    (folder / records.HEADER).write_text('{"schema": 99}')
    with pytest.raises(ValueError, match="of schema 99 and this version reads"):
        read(folder)
    with pytest.raises(FileNotFoundError, match="name the folder of an evaluation run"):
        read(folder / "absent")


def test_another_run_is_told_by_its_options() -> None:
    other = dataclasses.replace(HEADER, batch=4, options={"samples": 3})
    assert differences(HEADER, other) == ["batch: 2 there, 4 now", "samples: 8 there, 3 now"]
    of_older = dataclasses.replace(HEADER, contents={})
    changed = dataclasses.replace(HEADER, contents={"prompts": "a", "draft longspec": "b"})
    again = dataclasses.replace(HEADER, contents={"prompts": "a", "draft longspec": "c"})
    assert not differences(of_older, changed)
    assert differences(changed, again) == ["draft longspec: changed under the same name"]
