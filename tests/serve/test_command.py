"""The command itself: what it prints, what it refuses, and how it ends."""

import dataclasses
import gc
import json
import shlex
import socket
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infer.serve import __main__ as command
from infer.serve.arguments import parser, read_keys, read_template
from infer.serve.command import Service, curl, fitting_slots, planned_engine, server_words
from infer.serve.http_server import HttpServer, bound
from longspec_jax import LongSpec, cli
from longspec_jax.drafters.ngram import NgramDraft
from longspec_jax.generation.models import Models
from tests.infer.toys import toy_spec
from tests.serve.kit import Client, child, events, port_of


@pytest.mark.parametrize(
    "typed, words",
    [
        (["--port=70000"], "--port: 70000 must be a whole number from 0 to 65535"),
        (["--host=no.such.host.invalid"], "--host=no.such.host.invalid is no address"),
        (["--host=192.0.2.1"], "--host=192.0.2.1 --port=8000 cannot be used"),
        (["--api_key=a", "--api_key_file=b"], "not allowed with argument"),
        (["--api_key_file=/nonexistent"], "--api_key_file: /nonexistent cannot be read: No such"),
        (["--max_num_seqs=2", "--gpu_memory_utilization=0.5"], "not allowed with argument"),
        (["--max_model_len=1"], "--max_model_len: 1 must be a whole number from 2"),
        (
            ["--gpu_memory_utilization=1.5"],
            "--gpu_memory_utilization: 1.5 must be above 0, at most 1",
        ),
        (["--chat_template=/nonexistent"], "--chat_template: /nonexistent cannot be read"),
        (["--draft=somewhere"], "--draft somewhere needs the --target it was made for"),
        (["--prot=1"], "did you mean --port?"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    typed: list[str], words: str, capsys: pytest.CaptureFixture
) -> None:
    assert command.main(typed) == cli.BAD_INPUT
    assert words in capsys.readouterr().err


def test_the_hosts_memory_is_more_than_what_32_bits_count() -> None:
    """32,000 tokens of a 7B model are 17 GB."""
    found = parser().parse_args(["--cpu_prefix_cache_bytes=64000000000"])
    assert found.cpu_prefix_cache_bytes == 64_000_000_000


def test_a_port_in_use_is_one_sentence(capsys: pytest.CaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert command.main([f"--port={port}"]) == cli.BAD_INPUT
    [line] = capsys.readouterr().err.splitlines()
    assert line == (
        f"error: --host=127.0.0.1 --port={port} cannot be used: Address already in use; name "
        "another --port (0 for any free one) or --host"
    )


def test_a_bound_port_does_not_answer_yet() -> None:
    with bound("127.0.0.1", 0) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname())


def test_a_port_is_taken_while_its_server_compiles() -> None:
    with bound("127.0.0.1", 0) as listener, pytest.raises(OSError, match="cannot be used"):
        bound("127.0.0.1", listener.getsockname()[1])


def test_keys_and_templates_are_read(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("  secret\n")
    assert read_keys(parser().parse_args([f"--api_key_file={file}"])) == ("secret",)
    assert read_keys(parser().parse_args(["--api_key=x"])) == ("x",)
    assert read_keys(parser().parse_args([])) == ()
    file.write_text("mine\n\n theirs \n")
    assert read_keys(parser().parse_args([f"--api_key_file={file}"])) == ("mine", "theirs")
    for wrong in ("\n", "mine\ntheirs\nmine\n"):
        file.write_text(wrong)
        with pytest.raises(ValueError, match="must hold the key on one line"):
            read_keys(parser().parse_args([f"--api_key_file={file}"]))
    assert read_template(parser().parse_args(["--chat_template=vicuna"])) == "vicuna"
    file.write_text("{{ messages }}")
    assert read_template(parser().parse_args([f"--chat_template={file}"])) == "{{ messages }}"


def test_slots_follow_from_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = toy_spec()
    make = partial(spec.engine, max_model_len=64)
    one, two = (make(max_num_seqs=n).memory.needed_bytes for n in (1, 2))
    free = one + 5 * (two - one)
    monkeypatch.setattr("infer.serve.command.free_bytes", lambda mesh: free)
    assert fitting_slots(spec, 1.0, 32, make) == 6
    assert fitting_slots(spec, 1.0, 4, make) == 4
    assert fitting_slots(spec, one / free, 32, make) == 1


def planned(*typed: str) -> Any:
    arguments = parser().parse_args(["--target=toy", "--draft=toy", *typed])
    with socket.socket() as unused, server_words():
        return Service(arguments, unused)._planned(toy_spec())


def said_first(spec: LongSpec, *typed: str) -> str:
    """What the server says first of these models."""
    arguments = parser().parse_args(["--max_num_seqs=1", "--max_model_len=64", *typed])
    with socket.socket() as unused:
        service = Service(arguments, unused)
        return next(service._lines(spec, service._planned(spec)))


def test_the_first_line_names_all_drafters_and_all_trees() -> None:
    """The tallest tree may be that of lookup alone, as the demo's is."""
    joined = dataclasses.replace(toy_spec(), draft=(*toy_spec().drafts, NgramDraft()))
    candidates = [str(use.tree) for use in planned_engine(joined, max_len=64, slots=1).trees]
    assert len(candidates) > 1
    words = f"draft longspec+ngram, tree the fastest of {', '.join(candidates)}; "
    assert words in said_first(joined)
    assert "draft longspec+ngram, tree none@8~7; " in said_first(joined, "--tree=none@8~7")
    assert "draft longspec, tree 2,2; " in said_first(toy_spec(), "--tree=2,2")
    assert "no draft; " in said_first(toy_spec(), "--tree=none")


def planned_with(free: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("longspec_jax.generation.memory.free_bytes", lambda mesh: free)
    return planned("--max_num_seqs=3", "--max_model_len=64", "--tree=2,2")


def test_more_nodes_than_the_kernels_verify_are_refused_before_anything_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a Hopper GPU."""
    spec = toy_spec(dtype="bfloat16")
    same = dataclasses.replace(spec.target, batch_invariant=True)
    same.check_rows(64, 64)
    monkeypatch.setattr(Models, "target", property(lambda _: same))
    with pytest.raises(
        NotImplementedError, match="65 rows of 64 nodes .* at most --max_num_seqs=64 rows"
    ):
        with server_words():
            spec.engine(max_num_seqs=65, max_model_len=64, tree=(4, 15, 22, 22))


def test_a_server_that_does_not_fit_says_which_option_to_lower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = planned("--max_num_seqs=3", "--max_model_len=64", "--tree=2,2")
    assert engine.runner.slots == 3 and engine.runner.drafter.tree.widths == (2, 2)
    # With less memory, fewer prompts are read next to as many slots.
    two = planned_with(engine.memory.needed_bytes - 1, monkeypatch)
    one = planned_with(two.memory.needed_bytes - 1, monkeypatch)
    assert engine.runner.slots == two.runner.slots == one.runner.slots == 3
    with pytest.raises(MemoryError) as caught:
        planned_with(one.memory.needed_bytes - 1, monkeypatch)
    assert "(--max_num_seqs=2)" in str(caught.value)
    with pytest.raises(ValueError, match="--max_model_len=999999 is more than the .* tokens"):
        planned("--max_model_len=999999")


def test_the_command_that_is_printed_says_where_the_key_goes() -> None:
    typed = curl("http://127.0.0.1:1", "secret")
    assert "secret" not in typed and typed.endswith('-H "Authorization: Bearer $API_KEY"')
    typed = curl("http://127.0.0.1:1", "secret", Path("my keys"))  # Typed as it is, it works.
    assert typed.endswith("""-H "Authorization: Bearer $(grep -m1 . 'my keys')\"""")


def test_a_server_with_a_file_of_keys_announces_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The option's own value reaches the command that is printed."""
    file = tmp_path / "keys"
    file.write_text("secret\n")
    arguments = parser().parse_args(["--target=toy", f"--api_key_file={file}"])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        Service(arguments, listener, read_keys(arguments))._announce()
    said = capsys.readouterr().out
    assert f"Bearer $(grep -m1 . {file})" in said and "secret" not in said


def test_what_was_compiled_is_not_collected_while_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen: list[int] = []

    async def run(*_: Any) -> int:
        frozen.append(gc.get_freeze_count())
        return cli.OK

    monkeypatch.setattr(HttpServer, "run", run)
    monkeypatch.setattr(HttpServer, "__init__", lambda *_: None)
    monkeypatch.setattr(Service, "served", lambda _: None)
    monkeypatch.setattr("infer.serve.command.log_to_stderr", lambda: None)
    with socket.socket() as listener:
        arguments = parser().parse_args(["--target=toy"])
        try:
            assert Service(arguments, listener, None).serve() == cli.OK
        finally:
            gc.unfreeze()
    assert frozen[0] > 10_000


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_server_from_its_start_to_its_end(tmp_path: Path) -> None:
    """Started as a user does, asked by the printed command, left by a client, ended by SIGTERM."""
    with child(tmp_path, "--max_num_seqs=2", "--served_model_name=toy") as (process, lines):
        assert any("memory plan" in line for line in lines), lines
        _, asked, page = lines[-3:]
        port = port_of(lines)
        assert page == f"page:  http://127.0.0.1:{port}/\n"
        answer = subprocess.run(
            shlex.split(asked.removeprefix("try:")), capture_output=True, check=True, timeout=60
        )
        assert json.loads(answer.stdout)["usage"]["completion_tokens"] > 0
        server: Any = Client(port, None, None)  # type: ignore[arg-type]
        body = {"prompt": "ab", "max_tokens": 250, "stream": True, "ignore_eos": True}
        cut = server.connect("POST", "/v1/completions", body)
        assert next(events(cut))["choices"]
        cut.connection.sock.close()
        stream = server.connect("POST", "/v1/completions", body)
        chunks = events(stream)
        assert next(chunks)["choices"]
        process.terminate()
        *_, closing, done = chunks
        assert closing["choices"][0]["finish_reason"] == "length" and done == "[DONE]"
        begun = time.monotonic()
    assert time.monotonic() - begun < 30
