"""What all commands share: arguments, refusals, exit statuses and signals."""

import argparse
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from benchmarks.arguments import BENCHMARKS
from longspec_jax import cli, files
from longspec_jax.checks import Real
from longspec_jax.config.tree import TreeConfig
from tests.kit import each_row


def parser() -> cli.Parser:
    result = cli.Parser(prog="command")
    result.add_argument(
        "--temperature", type=cli.value(Real(0, 9, "0 to 9")), default=0.5, help="heat"
    )
    result.add_argument(
        "--context", **cli.several(cli.COUNT, commas=True), default=[64], help="tokens"
    )
    result.add_argument("--draft", **cli.several(cli.path), help="a folder")
    return result


def test_lists_repeat_the_option_and_replace_the_default() -> None:
    assert parser().parse_args([]).context == [64]
    given = ["--context=1", "--context", "2", "--draft=a,b", "--draft=c"]
    found = parser().parse_args(given)
    assert found.context == [1, 2] and found.draft == ["a,b", "c"]
    assert parser().parse_args(["--context=1,2"]).context == [1, 2]  # Commands as they once were.
    assert parser().parse_args([]).context == [64]


@each_row(
    ("argv", "message"),
    [
        (["--temprature=1"], "unknown option --temprature; did you mean --temperature?"),
        (["--nothing_like_it"], "unknown option --nothing_like_it (--help"),
        (["file"], "unexpected argument 'file'"),
        (["--context=0"], "--context: 0 must be a whole number from 1"),
        (["--draft", "~nobody_here/x"], "--draft: ~nobody_here/x: there is no home folder"),
    ],
)
def test_mistakes_are_answered_with_the_nearest_option(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        parser().parse_args(argv)
    assert message in str(error.value)


def test_help_shows_defaults_and_what_is_repeated() -> None:
    text = " ".join(parser().format_help().split())
    assert "default 0.5" in text and "default 64; repeat for several" in text


def test_the_default_of_the_machine_is_shown_and_chosen() -> None:
    default = cli.ByMachine([4096, 8192], [64])
    assert str(default) == "default 4096, 8192, on a CPU 64"
    arguments = argparse.Namespace(context=default, other=1)
    assert vars(cli.settled(arguments, cpu=True)) == {"context": [64], "other": 1}
    assert cli.settled(arguments, cpu=False).context == [4096, 8192]


def test_options_of_a_draft() -> None:
    pairs = [*map(cli.draft_option, ("int8", "vocabulary=64", "share=0.5", "x=False", "y=z"))]
    assert cli.as_options(pairs) == {
        "int8": True,
        "vocabulary": 64,
        "share": 0.5,
        "x": False,
        "y": "z",
    }
    with pytest.raises(ValueError, match="--draft_option int8 is given twice"):
        cli.as_options([("int8", True), ("int8", False)])


def test_trees_have_parts_with_an_effect() -> None:
    assert cli.tree("4,16@8") == TreeConfig((4, 16), 8)
    for text, words in (("4@9", "more nodes"), ("4+0.5", "has none"), ("x", "must be the widths")):
        with pytest.raises(argparse.ArgumentTypeError, match=words):
            cli.tree(text)


def test_names_are_suggested() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="; did you mean mosaic"):
        cli.one_of(["mosaic", "xla"])("mosiac")
    with pytest.raises(argparse.ArgumentTypeError, match="must be one of mosaic, xla$"):
        cli.one_of(["mosaic", "xla"])("cudnn")


def raising(error: BaseException) -> int:
    raise error


@each_row(
    ("error", "status", "words"),
    [
        (ValueError("--x=1 is wrong"), 2, "error: --x=1 is wrong"),
        (MemoryError(), 2, "error: out of memory"),
        (OSError(), 1, "failed while running: OSError"),
        (FloatingPointError("no numbers"), 1, "error: no numbers"),
        (KeyError("x"), 1, "failed while running: KeyError: 'x'"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (cli.Stopped(signal.SIGTERM), 143, "interrupted"),
        (cli.Stopped(signal.SIGHUP), 129, "interrupted"),
    ],
)
def test_an_error_is_one_message_and_a_status(
    error: BaseException, status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(lambda: raising(error), []) == status
    assert capsys.readouterr().err.startswith(words)


def test_a_full_disk_is_no_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    with pytest.raises(OSError) as full:
        files.replace(tmp_path / "header.json", b"{}")
    assert not [*tmp_path.iterdir()]
    message, status = cli.explained(full.value)
    where = tmp_path / "header.json"
    assert message.startswith(f"failed while running: No space left on device: {where}; make room")
    assert status == cli.FAILED


def test_handlers_of_signals_are_put_back_and_what_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with cli.stop_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # Tests begun with nohup ignore it.
from longspec_jax import cli

def work():
    print("begun", flush=True)
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass

def main():
    try:
        cli.run_in_thread(work)
    except KeyboardInterrupt as stop:
        return cli.leave(stop, lambda: print("saved", flush=True))

sys.exit(cli.run(main))
"""


@pytest.mark.multiproc
@each_row(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_every_signal_saves_and_ends_whatever_the_work_does(number: int, status: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "begun\n"
    begin = time.monotonic()
    child.send_signal(number)
    out, _ = child.communicate(timeout=30)
    assert (out, child.returncode) == ("saved\n", status)
    assert time.monotonic() - begin < 20


@pytest.mark.multiproc
@each_row("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams_are_empty_ones(closed: str, tmp_path: Path) -> None:
    code = (
        "import sys; from longspec_jax import cli\n"
        "def work():\n"
        "    print('text'); sys.stdout.flush(); sys.stderr.flush(); sys.stdin.read(0)\n"
        f"    open({str(tmp_path / 'done')!r}, 'w').write('x')\n"
        "    raise ValueError('wrong')\n"
        "sys.exit(cli.run(work))\n"
    )
    command = f'"{sys.executable}" -c "$CODE" {closed}'
    found = subprocess.run(["sh", "-c", command], env={**os.environ, "CODE": code}, check=False)
    assert found.returncode == 2
    assert (tmp_path / "done").read_text() == "x"  # And not the text of a stream next to it.


@pytest.mark.multiproc
@each_row(
    ("module", "calls", "said"),
    [
        ("infer.decode", ["--help", "--seed=-1", "--prompt_file=absent"], "--seed: -1"),
        (
            "infer.eval.__main__",
            ["--help", "--task=demo --samples=0 --out=x"],
            "--samples: 0 must be",
        ),
        (
            "benchmarks.__main__",
            ["--help", *(f"{name} --help" for name in BENCHMARKS), "fly"],
            "'fly'",
        ),
    ],
)
def test_help_and_a_typing_error_import_nothing_slow(module, calls, said) -> None:
    """Such as jax, which takes a second and more; only tasks of evaluations need NumPy."""
    slow = ["jax", "flax", "torch", "transformers", "matplotlib"]
    slow += [] if module == "infer.eval.__main__" else ["numpy"]
    script = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({slow}))\n"
        f"from {module} import main\n"
        f"for call in {calls}:\n"
        "    try: main(call.split())\n"
        "    except SystemExit: pass\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and said in done.stderr, done.stderr
    helps = done.stdout.count(f"usage: python -m {module.removesuffix('.__main__')}")
    assert helps == sum(call.endswith("--help") for call in calls)


def test_libraries_are_quiet_unless_the_user_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's request to file a bug is one of its errors, which level 3 leaves out."""
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    cli.run(lambda: 0, [])
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "3"
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "info"


PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def test_a_command_is_named_as_it_was_typed() -> None:
    assert cli.command_name("infer", "decode") == "python -m infer.decode"
    assert cli.command_name("longspec_jax.infer", "decode") == "longspec-decode"
    assert cli.command_name("infer.eval") == "python -m infer.eval"


def test_help_names_other_commands_as_they_are_installed() -> None:
    about = "see python -m train.regenerate and python -m benchmarks"
    for prog, said in {
        "longspec-train": "see longspec-regenerate and python -m benchmarks",
        "python -m train.run": about,
    }.items():
        assert said in cli.Parser(prog=prog, description=about).format_help()


def test_a_message_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A file's names are in messages: of a tensor, of what a template raises."""
    cli.fail(ValueError("unexpected \x1b]0;title\x07 (3,)\n\tas in é"))
    assert capsys.readouterr().err == "error: unexpected \ufffd]0;title\ufffd (3,)\n\tas in é\n"


def test_every_script_is_installed() -> None:
    for script, point in PROJECT["scripts"].items():
        module, _, function = point.partition(":")
        assert function == "main"
        name = module.removeprefix("longspec_jax.").removesuffix(".__main__")
        assert cli.SCRIPTS[name] == script
    assert set(PROJECT["scripts"]) == set(cli.SCRIPTS.values())
