"""A conversation: from a pipe, and in a terminal where Ctrl-C ends an answer and no more."""

import _thread
import io
import os
import select
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from infer import chat
from infer.conversation import Conversation, Turn
from infer.screen import GREEN, RESET, Screen
from longspec_jax import cli
from tests.children import environment
from tests.infer.test_interruption import read_from
from tests.infer.test_screen import Terminal
from tests.infer.toys import save_toy, toy_spec, toy_tokenizer

ROOT = Path(__file__).parents[2]
SAMPLING = dict(max_new_tokens=12, temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    target, draft = save_toy(tmp_path_factory.mktemp("toy"))
    sampling = [f"--{name}={value}" for name, value in SAMPLING.items()]
    models = [f"--target={target}", f"--draft={draft}", "--tree=4,5", "--prefill_chunk=32"]
    return [*models, *sampling, "--max_model_len=96", "--ignore_eos"]


@pytest.fixture(scope="module")
def loaded(folders) -> Any:
    """One engine for all conversations."""
    talk = chat.Chat(chat.parser().parse_args(folders))
    talk.load()
    yield talk
    talk.conversation.close()


def conversed(loaded, monkeypatch, lines: list[Any], terminal: bool = False) -> tuple[int, str]:
    """Exit status of a conversation of these lines, and what it shows."""
    out = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    monkeypatch.setattr(loaded, "_is_terminal", terminal)
    monkeypatch.setattr(loaded, "screen", Screen(terminal, out, loaded._status))
    monkeypatch.setattr(loaded, "_refused", False)
    monkeypatch.setattr(loaded.conversation, "turns", [])
    monkeypatch.setattr(loaded.conversation, "close", lambda: None)
    if terminal:
        script = iter(lines)

        def typed(prompt: str) -> str:
            line = next(script, None)
            if line is None:
                raise EOFError
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", typed)
    return loaded.talk(), out.getvalue()


def generated(loaded, document: str) -> str:
    """The text after a document, as a request of its own."""
    engine, said = loaded.conversation._engine, ""
    engine.submit(document, **SAMPLING, eos_token_id=[])
    while engine.busy:
        said += "".join(output.text for output in engine.step())
    return said


def test_lines_of_a_pipe_are_turns_of_one_text(loaded, monkeypatch, capsys) -> None:
    """Without a chat template; every answer is that of a call of its own."""
    first = generated(loaded, "ab cd\n")
    document = f"ab cd\n{first}{'' if first.endswith(chr(10)) else chr(10)}gh\n"
    second, alone = generated(loaded, document), generated(loaded, "/b\n")
    lines = ["ab cd", "", "gh", "/reset", "//b", "/exit", "ab"]
    status, shown = conversed(loaded, monkeypatch, lines)
    ended = [text if text.endswith("\n") else f"{text}\n" for text in (first, second, alone)]
    assert (status, shown) == (0, "".join(ended))
    assert loaded.conversation.turns == [Turn("/b", alone)]
    assert capsys.readouterr().err == ""


def test_a_file_comes_before_the_next_message(loaded, monkeypatch, tmp_path, capsys) -> None:
    (tmp_path / "a b").write_text("abc")
    lines = [f"/file {tmp_path}", "/file ", f"/file {tmp_path / 'a b'}", "gh", "/reset", "gh"]
    status, shown = conversed(loaded, monkeypatch, lines)
    texts = (generated(loaded, text) for text in ("abc\n\ngh\n", "gh\n"))
    assert shown == "".join(text if text.endswith("\n") else f"{text}\n" for text in texts)
    first, second = capsys.readouterr().err.splitlines()
    assert status == 2 and first.startswith(f"error: /file: {tmp_path} cannot be read: ")
    assert second == "error: /file needs the name of a file"


def test_what_cannot_be_met_is_refused_in_a_sentence(loaded, monkeypatch, capsys) -> None:
    lines = ["/forget", "/forget 2", "/what", "ab", "c" * 90, "/forget 1", "d" * 80, "gh"]
    status, shown = conversed(loaded, monkeypatch, lines)
    expected = [generated(loaded, text) for text in ("ab\n", "d" * 80 + "\n", "gh\n")]
    assert status == 2 and shown.startswith(expected[0])
    said = capsys.readouterr().err.splitlines()
    assert said[:3] == [
        "error: /forget needs the number of turns to drop, such as /forget 1",
        "error: /forget 2: the conversation has 0 turns",
        "error: unknown command /what; /help lists those there are",
    ]
    assert "--max_new_tokens 12 for the answer exceed the 96 of --max_model_len" in said[3]
    assert said[3].endswith("; /forget N drops the N oldest of 1 turns, /reset begins anew")
    assert "d" * 80 in loaded.conversation.turns[0].user and len(said) == 5


def test_a_terminal_has_colours_and_ctrl_c_ends_an_answer(loaded, monkeypatch, capsys) -> None:
    first = "ab cd " * 6
    answer = generated(loaded, f"{first}\n")
    step, steps = type(loaded.conversation._engine).step, []

    def interrupted(engine):
        """Ctrl-C in the third step of the second turn; the answer ends before the next one."""
        steps.append(len(loaded.conversation.turns))
        if steps.count(1) == 3 and steps[-1] == 1:
            _thread.interrupt_main()
            threading.Event().wait(1)
        return step(engine)

    monkeypatch.setattr(type(loaded.conversation._engine), "step", interrupted)
    lines = [first, "gh", KeyboardInterrupt(), "/forget 2", first]
    status, shown = conversed(loaded, monkeypatch, lines, terminal=True)
    assert status == 0 and GREEN in shown and "(ended by Ctrl-C)" in shown
    assert "Ctrl-D or /exit leaves" in shown and shown.count(" per target pass, ") >= 2
    assert shown.count("32 of the prompt reused") >= 2, "a chunk"
    bare = shown.replace(GREEN, "").replace(RESET, "")
    assert bare.startswith(answer) and bare.count(answer) == 2
    assert 3 <= steps.count(1) < 6
    assert [turn.user for turn in loaded.conversation.turns] == [first]


def test_a_signal_that_ends_the_program_does(loaded, monkeypatch) -> None:
    for terminal, stop in ((True, cli.Stopped(15)), (False, KeyboardInterrupt())):
        monkeypatch.setattr(loaded.conversation, "ask", Mock(side_effect=stop))
        with pytest.raises(type(stop)):
            conversed(loaded, monkeypatch, ["ab"], terminal)


def test_turns_are_messages_with_a_style(loaded, monkeypatch) -> None:
    arguments = loaded._arguments
    monkeypatch.setattr(arguments, "prompt_style", "vicuna")
    monkeypatch.setattr(arguments, "system", "abc.")
    made: list[bool] = []
    monkeypatch.setattr(
        type(toy_spec()), "engine", lambda *_, **options: made.append(options["enable_penalties"])
    )
    monkeypatch.setattr(arguments, "frequency_penalty", 0.5)
    Conversation(toy_spec(), arguments)
    monkeypatch.setattr(arguments, "frequency_penalty", 0.0)
    conversation = Conversation(toy_spec(), arguments)
    assert made == [True, False], "tables for penalties where there are any"
    conversation.keep(Turn("d", "f"))
    assert not conversation.is_plain
    text = "abc. USER: d ASSISTANT: f<end>USER: g ASSISTANT:"
    assert conversation._tokens("g") == toy_tokenizer()(text)["input_ids"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--system=abc", "--system is a message of a chat template and this target has none"),
        ("--max_model_len=9999", "--max_model_len 9999 is more than the target's 1024 positions"),
        ("--top_k=3 --temperature=0", "--top_k 3 filters what is drawn"),
        ("--max_num_seqs=3", "unknown option --max_num_seqs"),
        ("--stop=", "--stop: '' must be text that is not empty"),
    ],
)
def test_options_that_cannot_be_met(folders, given, said, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert chat.main([*folders, *given.split()]) == 2
    assert said in capsys.readouterr().err


UNLOADED = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from unittest.mock import Mock
from infer import chat
chat.Chat.load = lambda self: setattr(self, "_conversation", Mock())
sys.exit(chat.main())
"""


@pytest.mark.multiproc
def test_in_a_real_terminal() -> None:
    """Ctrl-C clears a line and keeps the conversation, Ctrl-D leaves it."""
    pytest.importorskip("readline")
    terminal, its_end = os.openpty()
    streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), its_end)
    process = subprocess.Popen(
        [sys.executable, "-c", UNLOADED],
        cwd=ROOT,
        env=environment(TERM="xterm"),
        start_new_session=True,
        **streams,
    )
    os.close(its_end)
    try:
        shown_after(terminal, b"ab", until="ab")
        # It may come between two system calls of readline, which then waits for another key.
        shown_after(terminal, b"\x03", until="Ctrl-D or /exit leaves", again=True)
        shown = shown_after(terminal, b"/help\n", until="stays in the conversation.")
        assert "/file PATH" in shown and "error" not in shown
        shown_after(terminal, b"\x04", until="")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def shown_after(terminal: int, keys: bytes, until: str, again: bool = False) -> str:
    """What a terminal shows after keys that are typed once the program reads them.

    Until then the terminal gives lines, and readline asks for single keys.
    """
    end = time.monotonic() + 60
    while termios.tcgetattr(terminal)[3] & termios.ICANON:
        assert time.monotonic() < end, "the program does not read"
        time.sleep(0.01)
    os.write(terminal, keys)
    shown = ""
    while until not in shown:
        assert time.monotonic() < end, shown
        if select.select([terminal], [], [], 0.5)[0]:
            shown += read_from(terminal)
        elif again:
            os.write(terminal, keys)
    return shown
