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

from infer import decode
from infer.screen import Screen
from longspec_jax import (
    PLAIN,
    GenerateResult,
    LongSpec,
    MemoryPlan,
    Stats,
    StreamRound,
    TreeUse,
    cli,
)
from longspec_jax.generation.comparison import Comparison
from longspec_jax.generation.text import Piece
from longspec_jax.status_line import ERASE
from tests.children import environment
from tests.infer.toys import save_toy

ROOT = Path(__file__).parents[2]
WITHIN = 20.0
"""Seconds in which Ctrl-C is answered even where other processes take all cores; else in two."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    target, draft = save_toy(tmp_path_factory.mktemp("toy"))
    return [f"--target={target}", f"--draft={draft}"]


def stats(rows: int, rounds: int) -> Stats:
    return Stats(
        prompt_tokens=(2,) * rows,
        new_tokens=(1 + 2 * rounds,) * rows,
        target_passes=(rounds,) * rows,
        histograms=((0, rounds),) * rows,
        trees=(TreeUse("plain", PLAIN, rounds, 2 * rounds * rows, rounds * 0.5),),
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
    """A library call that the user leaves in its third round, as a compiler would notice."""

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


@pytest.mark.parametrize("options", [(), ("--no-stream",)])
def test_prompts_that_were_finished_are_written(
    folders, options, monkeypatch, tmp_path, capsys
) -> None:
    """Of the one under way nothing is; with --stream its text is on the screen."""
    files = [tmp_path / name for name in ("one", "two", "three")]
    for file in files:
        file.write_text("ab")
    path = tmp_path / "out.json"
    argv = [*folders, *(f"--prompt_file={file}" for file in files), f"--json={path}", *options]
    assert left(argv, Interrupted(monkeypatch, before=1)) == (130, [130])
    printed = capsys.readouterr()
    assert printed.out.count("abcbc") == (1 if options else 2)
    *status, last = printed.err.splitlines()  # A slow machine says what takes it so long.
    assert last == "interrupted" and all(line.startswith("... ") for line in status)
    found = json.loads(path.read_text())
    assert found["interrupted"] is True and [row["name"] for row in found["rows"]] == ["one"]
    assert found["text"] == "abcbc" and found["new_tokens"] == 5
    assert found["setting"]["dtype"] == "float32"


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


def test_numbers_are_written_before_the_screen_is_closed(folders, monkeypatch, tmp_path) -> None:
    """A terminal stopped with Ctrl-S, or a full pipe, takes nothing and keeps its lock."""
    path, found = tmp_path / "out.json", []
    close = Screen.close

    def stopped(self):
        found.append(path.exists())
        close(self)

    monkeypatch.setattr(Screen, "close", stopped)
    left([*folders, "--prompt=ab", f"--json={path}"], Interrupted(monkeypatch))
    assert found[0]


class Failing(Interrupted):
    """A library call that succeeds ``before`` times, and then fails after two rounds."""

    def __init__(self, monkeypatch, before: int, error: Exception):
        super().__init__(monkeypatch, before)
        self.error = error

    def call(self, tokens, *, on_round, **options):
        if self.calls < self.before:
            return super().call(tokens, on_round=on_round, **options)
        for added in rounds(len(tokens), 2):
            on_round(added)
        raise self.error


def test_a_failure_keeps_what_was_finished(folders, monkeypatch, tmp_path, capsys) -> None:
    path, files = tmp_path / "out.json", [tmp_path / "one", tmp_path / "two"]
    for file in files:
        file.write_text("ab")
    argv = [*folders, *(f"--prompt_file={file}" for file in files), f"--json={path}"]
    Failing(monkeypatch, 1, RuntimeError("RESOURCE_EXHAUSTED"))
    assert decode.main(argv) == 1
    printed, found = capsys.readouterr(), json.loads(path.read_text())
    assert [row["name"] for row in found["rows"]] == ["one"]
    assert found["interrupted"] is True and found["new_tokens"] == 5
    assert printed.err == "failed while running: RuntimeError: RESOURCE_EXHAUSTED\n"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('"ab"\n"cd"', "error: the target's logits of batch.jsonl, line 2 after 3 tokens are not"),
        ('"ab"', "error: the target's logits after 3 tokens are not finite; try dtype=float32\n"),
    ],
)
def test_a_model_that_overflows(folders, monkeypatch, tmp_path, capsys, lines, said) -> None:
    """A failure of the run, in words, with the row as it was written."""
    path = tmp_path / "batch.jsonl"
    path.write_text(lines)
    words = "the target's logits of row 1 after 3 tokens are not finite; try dtype=float32"
    alone = words.replace(" of row 1", "")
    Failing(monkeypatch, 0, FloatingPointError(words if "\n" in lines else alone))
    assert decode.main([*folders, f"--batch={path}"]) == 1
    assert said in capsys.readouterr().err


def test_which_of_several_prompts_overflows(folders, monkeypatch, tmp_path, capsys) -> None:
    (tmp_path / "two.txt").write_text("ab")
    argv = [f"--prompt_file={tmp_path / 'two.txt'}"] * 2
    Failing(monkeypatch, 0, FloatingPointError("the target's logits are not finite"))
    assert decode.main([*folders, *argv]) == 1
    assert capsys.readouterr().err == "error: two.txt: the target's logits are not finite\n"


def test_work_runs_to_its_end_and_raises_what_it_raises() -> None:
    found = []
    cli.run_in_thread(lambda: found.append(threading.current_thread().name))
    assert found == ["work"]
    with pytest.raises(ZeroDivisionError):
        cli.run_in_thread(lambda: 1 / 0)


def start(*argv: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "infer.decode", *argv]
    return subprocess.Popen(command, cwd=ROOT, env=environment(TERM="xterm"), text=True, **options)


def interrupt_at(sign: str, *argv: str, by: int = signal.SIGINT) -> tuple[int, str]:
    """Exit status and last words of a command that is left when its status line says this."""
    terminal, its_end = os.openpty()
    process = start(*argv, stdout=subprocess.DEVNULL, stderr=its_end)
    os.close(its_end)
    shown = ""
    while sign not in shown:
        read = read_from(terminal)
        assert read, f"ended without {sign!r}: {shown}"
        shown += read
    process.send_signal(by)
    begin = time.perf_counter()
    status = process.wait(60)
    assert time.perf_counter() - begin < WITHIN
    while read := read_from(terminal):
        shown += read
    os.close(terminal)
    return status, shown.split(ERASE)[-1]


def read_from(terminal: int) -> str:
    """What a terminal is written next; nothing once nobody has it open."""
    try:
        return os.read(terminal, 4096).decode()
    except OSError:
        return ""


@pytest.mark.multiproc
@pytest.mark.parametrize("sign", ["starting", "loading the models"])
def test_while_the_library_is_imported(folders, sign) -> None:
    assert interrupt_at(sign, *folders, "--prompt=a") == (130, "interrupted\r\n")


@pytest.mark.multiproc
@pytest.mark.parametrize(("by", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_while_a_program_is_compiled(folders, tmp_path, by, status) -> None:
    path = tmp_path / "out.json"
    argv = [*folders, "--prompt=ab", "--tree=3,3,3", f"--json={path}"]
    assert interrupt_at("compiling", *argv, by=by) == (status, "interrupted\r\n")
    assert json.loads(path.read_text())["interrupted"] is True


@pytest.mark.multiproc
def test_a_suite_in_the_background_is_interruptible() -> None:
    """A shell's ``&`` lets its children, and theirs, ignore Ctrl-C unless told otherwise."""
    ask = "import tests.conftest, signal; print(signal.getsignal(signal.SIGINT).__name__)"
    command = f'trap "" INT; exec "{sys.executable}" -c "{ask}"'
    found = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == "default_int_handler\n", found.stderr


@pytest.mark.multiproc
@pytest.mark.parametrize("argv", ["--help", "--version"])
def test_a_reader_that_reads_nothing(argv) -> None:
    """As in ``| true``: neither a traceback nor the interpreter's last words."""
    process = start(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) in (0, cli.READER_GONE)


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
