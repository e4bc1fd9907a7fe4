"""What a terminal shows and a pipe does not: the status line, colours, folded lines."""

import io
import time

import pytest

from infer import results
from infer.output import tree_fields
from infer.screen import GREEN, RESET, Screen, described
from longspec_jax import TreeConfig, status_line
from longspec_jax.generation.activity import Compiling, DecodingPlainly, Prefilling, Tuned
from longspec_jax.generation.text import Piece
from longspec_jax.status_line import ERASE, StatusLine
from tests.kit import each_row


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    return Terminal()


def test_every_activity_is_described() -> None:
    assert described(Compiling()) == ("compiling, once for prompts of about this length", "")
    assert described(Tuned("longspec", TreeConfig((4, 5)), ())) is None
    prefilling = "reading the prompt", "[##........] 2048 of 8123 tokens"
    assert described(Prefilling(2048, 8123)) == prefilling
    assert described(DecodingPlainly(0, 64))[1] == "[..........] 0 of 64 tokens"
    assert described(DecodingPlainly(64, 64))[1] == "[##########] 64 of 64 tokens"


def test_the_line_is_gone_when_text_comes(terminal) -> None:
    screen = Screen(False, terminal, StatusLine(terminal))
    screen.activity(Prefilling(0, 100))
    screen.activity(Prefilling(50, 100))
    screen.line("text")
    screen.close()
    assert terminal.getvalue() == (
        f"{ERASE}reading the prompt  [..........] 0 of 100 tokens"
        f"{ERASE}reading the prompt  [#####.....] 50 of 100 tokens"
        f"{ERASE}text\n"
    )


def test_the_line_does_not_erase_text(terminal) -> None:
    """A completion that does not end its line keeps it."""
    screen = Screen(False, terminal, StatusLine(terminal))
    screen.dim("the end")
    screen.activity(DecodingPlainly(0, 10))
    screen.end_line()
    screen.close()
    assert terminal.getvalue().startswith(f"the end\n{ERASE}decoding plainly")
    assert terminal.getvalue().endswith(f"10 tokens{ERASE}")


def test_seconds_pass(terminal, monkeypatch) -> None:
    """Counted from when the work began, not from its last step."""
    monkeypatch.setattr(status_line, "TICK", 0.01)
    clock = iter(range(10**6))
    monkeypatch.setattr(status_line.time, "monotonic", lambda: next(clock))
    status = StatusLine(terminal)
    status.show("compiling")
    deadline = time.perf_counter() + 5
    while "compiling  3 s" not in terminal.getvalue() and time.perf_counter() < deadline:
        time.sleep(0.01)
    status.close()
    assert "compiling  3 s" in terminal.getvalue()
    length = len(terminal.getvalue())
    time.sleep(0.05)
    assert len(terminal.getvalue()) == length and terminal.getvalue().endswith(ERASE)


def test_the_line_is_one_line(terminal) -> None:
    StatusLine(terminal).show("x" * 100)
    assert terminal.getvalue() == ERASE + "x" * 59


@each_row("dumb", [True, False])
def test_what_is_short_is_not_mentioned_in_a_pipe(monkeypatch, dumb) -> None:
    monkeypatch.setenv("TERM", "dumb" if dumb else "xterm")
    out = Terminal() if dumb else io.StringIO()
    screen = Screen(False, out, StatusLine(out))
    screen.dim("text")
    screen.activity(Compiling())
    screen.status("loading")
    screen.close()
    assert out.getvalue() == "text"


def test_a_pipe_is_told_every_few_seconds(monkeypatch) -> None:
    """In lines of their own, for as long as it takes, and no longer."""
    monkeypatch.setattr(status_line, "EVERY", 0.05)
    pipe = io.StringIO()
    screen = Screen(False, io.StringIO(), StatusLine(pipe))
    screen.activity(Compiling())
    deadline = time.perf_counter() + 5
    while pipe.getvalue().count("\n") < 2 and time.perf_counter() < deadline:
        time.sleep(0.01)
    screen.line("text")
    said = pipe.getvalue()
    assert said.count("... compiling, once for prompts of about this length") >= 2
    assert ERASE not in said
    time.sleep(0.2)
    assert pipe.getvalue() == said
    screen.close()


@each_row("columns", [1, 20])
def test_a_narrow_terminal(monkeypatch, columns) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal()
    screen = Screen(False, terminal, StatusLine(terminal))
    screen.entry("memory              draft state 1.0 MB whatever the context")
    screen.activity(Prefilling(0, 100))
    screen.close()
    assert "whatever" in terminal.getvalue().replace("\n", "").replace(" ", "")


def test_a_terminal_that_has_gone(terminal) -> None:
    """It may have been closed; the run goes on."""

    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    status = StatusLine(Gone())
    status.show("compiling")
    status.close()


def test_entries_are_folded_under_their_label(terminal) -> None:
    entry = "memory              draft state 1.0 MB whatever the context, target cache 3.0 MB"
    Screen(False, terminal).entry(entry)
    lines = terminal.getvalue().splitlines()
    assert all(len(line) <= 60 for line in lines) and lines[1:] == [
        " " * 20 + "target cache 3.0 MB"
    ]
    piped = io.StringIO()
    Screen(False, piped).entry(entry)
    assert piped.getvalue() == f"{entry}\n"


@each_row("color", [True, False])
def test_a_line_is_ended_once(color) -> None:
    """Also where its end is coloured, and before the status that a log of both outputs takes."""
    out = io.StringIO()
    screen = Screen(color, out)
    screen.dim("text\n")
    screen.end_line()
    screen.dim("more")
    screen.activity(DecodingPlainly(0, 10))
    assert out.getvalue().count("\n") == 2


def test_an_answer_cannot_steer_the_terminal(terminal) -> None:
    """Escape sequences set a title or a clipboard; what is piped on is the text as it is."""
    text = "a\x1b]52;c;eA==\x07\x9b31m\r\n\tb\n"
    piped = io.StringIO()
    for out in (terminal, piped):
        Screen(True, out).pieces([Piece(text, False)])
    assert terminal.getvalue() == "a\ufffd]52;c;eA==\ufffd\ufffd31m\r\n\tb\n"
    assert piped.getvalue() == text


def test_the_legend_shows_its_colour() -> None:
    assert Screen(True, io.StringIO()).legend() == f"{GREEN}green{RESET}: accepted draft tokens"


def test_a_pipe_is_told_ever_more_rarely_of_one_work() -> None:
    written = [0]
    for second in range(200):
        if status_line.is_due(0, written[-1], second):
            written.append(second)
    assert written == [0, 5, 10, 20, 40, 80, 160]


def test_columns_of_trees_are_as_wide_as_their_names() -> None:
    """Drafters that propose into one tree have a long one."""
    use = {**tree_fields(TreeConfig((4, 8))), "rounds": 27, "tokens": 134, "seconds": 1.0}
    lines = [*results._tree_lines([{**use, "draft": "longspec+ngram"}, {**use, "draft": "ngram"}])]
    assert len({line.index("4,8") for line in lines[2:]}) == 1
    assert lines[1].index("tree") == lines[2].index("4,8")
