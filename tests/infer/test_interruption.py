"""Leaving the decode command early: by Ctrl-C at any moment, or because nobody reads on."""

import _thread
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from infer import decode, interruption
from longspec_jax import PLAIN, GenerateResult, LongSpec, MemoryPlan, Stats, StreamRound, TreeUse
from longspec_jax.generation.comparison import Comparison
from longspec_jax.generation.text import Piece
from tests.infer.toys import save_toy

ROOT = Path(__file__).parents[2]
WITHIN = 2.0
"""Seconds in which Ctrl-C must be answered."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    target, draft = save_toy(tmp_path_factory.mktemp("toy"))
    return [f"--target={target}", f"--draft={draft}", "--compilation_cache=off"]


def stats(rows: int, rounds: int) -> Stats:
    return Stats(
        prompt_tokens=(2,) * rows,
        new_tokens=(1 + 2 * rounds,) * rows,
        target_passes=(rounds,) * rows,
        histograms=((0, rounds),) * rows,
        trees=(TreeUse(PLAIN, rounds, 2 * rounds * rows, rounds * 0.5),),
        prefill_seconds=1.0,
        decode_seconds=rounds * 0.5,
        compile_seconds=3.0,
        draft_state_bytes=1_000_000,
        memory=MemoryPlan(rows, 256, 1, 2, 3_000_000, 4, 5),
    )


def rounds(rows: int, count: int):
    """What a call of the library would report: a token, then two a round."""
    yield StreamRound(
        ((3,),) * rows, ((False,),) * rows, ((Piece("a", False),),) * rows, stats(rows, 0)
    )
    for index in range(1, count + 1):
        pieces = (Piece("b", True), Piece("c", False))
        yield StreamRound(
            ((4, 5),) * rows, ((True, False),) * rows, (pieces,) * rows, stats(rows, index)
        )


class Interrupted:
    """A library call that the user leaves in its third round, as a compiler or a device would notice."""

    def __init__(self, monkeypatch, before: int = 0):
        self.calls, self.before, self.released = 0, before, threading.Event()
        monkeypatch.setattr(LongSpec, "compare", self.call)
        monkeypatch.setattr(LongSpec, "generate", self.call)

    def call(self, tokens, *, on_round, **options):
        self.calls += 1
        for added in rounds(len(tokens), 2):
            on_round(added)
        if self.calls > self.before:
            _thread.interrupt_main()
            self.released.wait(10)
            on_round(added)  # Nothing more is noted, nothing more is printed.
        ended = list(rounds(len(tokens), 2))
        texts = tuple("".join(added.text[row] for added in ended) for row in range(len(tokens)))
        result = GenerateResult(
            ((3, 4, 5),) * len(tokens), texts, ((),) * len(tokens), ended[-1].stats
        )
        return Comparison(result, result, ())


def left(argv: list[str], interrupted: Interrupted) -> tuple[int, list[int]]:
    """Exit status and how the process would have been ended."""
    ended: list[int] = []
    status = decode.main(argv, ended.append)
    interrupted.released.set()
    return status, ended


@pytest.mark.parametrize("options", [(), ("--no-stream",), ("--no-compare", "--no-stream")])
def test_what_was_decoded_is_shown_and_written(
    folders, options, monkeypatch, tmp_path, capsys
) -> None:
    path = tmp_path / "out.json"
    argv = [*folders, "--prompt=ab", f"--json={path}", *options]
    assert left(argv, Interrupted(monkeypatch)) == (130, [130])
    printed = capsys.readouterr()
    assert "--- completion ---\nabcbc\n" in printed.out and printed.out.count("abcbc") == 1
    assert "acceptance length   2.00 tokens per target pass" in printed.out
    assert "interrupted after 5 new tokens of prompt" in printed.out
    assert printed.err == "interrupted\n"
    found = json.loads(path.read_text())
    assert found["interrupted"] is True and found["text"] == "abcbc" and found["new_tokens"] == 5
    assert found["rows"][0]["tokens"] == [3, 4, 5, 4, 5] and found["target_passes"] == 2
    assert found["identical_to_plain"] is None and found["setting"]["dtype"] == "float32"


def test_every_prompt_so_far(folders, monkeypatch, tmp_path, capsys) -> None:
    files = [tmp_path / name for name in ("one", "two", "three")]
    for file in files:
        file.write_text("ab")
    argv = [*folders, *(f"--prompt_file={file}" for file in files), f"--json={tmp_path / 'out'}"]
    assert left(argv, Interrupted(monkeypatch, before=1)) == (130, [130])
    printed = capsys.readouterr().out
    assert "=== all 2 prompts ===" in printed and "new tokens of two" in printed
    found = json.loads((tmp_path / "out").read_text())
    assert [row["name"] for row in found["rows"]] == ["one", "two"] and found["interrupted"]
    assert found["new_tokens"] == 10


def test_the_rows_of_a_batch_so_far(folders, monkeypatch, tmp_path, capsys) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text('"ab"\n"cd"')
    assert left([*folders, f"--batch={path}"], Interrupted(monkeypatch)) == (130, [130])
    printed = capsys.readouterr().out
    assert "=== batch.jsonl, line 2: 2 tokens ===\nabcbc\n" in printed


def test_nothing_to_show(folders, monkeypatch, tmp_path, capsys) -> None:
    """Left before the first token; the JSON says as much."""

    def call(self, tokens, **options):
        _thread.interrupt_main()
        time.sleep(1)

    monkeypatch.setattr(LongSpec, "compare", call)
    path, ended = tmp_path / "out.json", []
    assert decode.main([*folders, "--prompt=ab", f"--json={path}"], ended.append) == 130 == ended[0]
    found = json.loads(path.read_text())
    assert found["interrupted"] is True and found["rows"] == [] == found["text"]
    assert found["acceptance_length"] is None and "Traceback" not in capsys.readouterr().err


def test_work_runs_to_its_end_and_raises_what_it_raises() -> None:
    found = []
    interruption.run_interruptibly(lambda: found.append(threading.current_thread().name))
    assert found == ["work"]
    with pytest.raises(ZeroDivisionError):
        interruption.run_interruptibly(lambda: 1 / 0)


def start(*argv: str, **options) -> subprocess.Popen:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "infer.decode", *argv]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, **options
    )


def interrupt(process: subprocess.Popen) -> tuple[int, float, str]:
    """Status, seconds until the end, and standard error."""
    process.send_signal(signal.SIGINT)
    begin = time.perf_counter()
    _, err = process.communicate(timeout=30)
    return process.returncode, time.perf_counter() - begin, err


@pytest.mark.multiproc
@pytest.mark.parametrize("seconds", [0.4, 1.2])
def test_while_the_library_is_imported(seconds) -> None:
    process = start("--prompt=a", stdout=subprocess.DEVNULL)
    time.sleep(seconds)
    status, waited, err = interrupt(process)
    assert (status, err) == (130, "interrupted\n") and waited < WITHIN


@pytest.mark.multiproc
def test_while_a_program_is_compiled(folders, tmp_path) -> None:
    path = tmp_path / "out.json"
    argv = ["--prompt=ab", "--tree=3,3,3", f"--json={path}"]
    process = start(*folders, *argv, stdout=subprocess.PIPE)
    while not process.stdout.readline().startswith("memory plan"):
        assert process.poll() is None, process.stderr.read()
    time.sleep(0.7)
    status, waited, err = interrupt(process)
    assert (status, err) == (130, "interrupted\n") and waited < WITHIN
    assert json.loads(path.read_text())["interrupted"] is True


@pytest.mark.multiproc
@pytest.mark.parametrize("argv", ["--list=prompts", "--help", "--version"])
def test_a_reader_that_reads_nothing(argv) -> None:
    """As in ``| true``: neither a traceback nor the interpreter's last words."""
    process = start(argv, stdout=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) in (0, decode.READER_GONE)


class Unread(io.StringIO):
    """Standard output whose reader goes after a line, as ``head -1`` does."""

    def __init__(self, descriptor: int):
        super().__init__()
        self.descriptor = descriptor

    def write(self, text: str) -> int:
        if "\n" in self.getvalue():
            raise BrokenPipeError
        return super().write(text)

    def fileno(self) -> int:
        return self.descriptor


def test_a_reader_that_has_read_enough(folders, monkeypatch, tmp_path, capsys) -> None:
    """The run ends quietly, and the numbers so far are kept."""
    path = tmp_path / "out.json"
    with open(tmp_path / "stdout", "w") as spare:
        monkeypatch.setattr(sys, "stdout", Unread(spare.fileno()))
        assert decode.main([*folders, "--prompt=ab", f"--json={path}"]) == 141
    assert capsys.readouterr().err == "" and json.loads(path.read_text())["interrupted"] is True
