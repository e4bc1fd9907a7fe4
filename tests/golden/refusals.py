"""Bad input of every way in: what kind of refusal, and whether the field is named; not the words.

Through Python the kind is the class of the error, through a command the exit status, through HTTP
the status and the field of the answer.
"""

import contextlib
import http.client
import importlib
import io
import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from longspec_jax import LongSpec

NUMBERS = ("x", [], {}, -1, 10**30, 1.5, math.nan, math.inf, True)
OPTIONS = {
    **{name: NUMBERS for name in ("max_new_tokens", "top_k", "seed")},
    **{name: ("x", [], {}, -1, 10**30, math.nan, math.inf) for name in ("temperature", "top_p")},
    **{name: ("x", -1, 2, math.nan) for name in ("min_p", "repetition_penalty")},
    **{name: ("x", 3, math.nan, -9) for name in ("frequency_penalty", "presence_penalty")},
    "logit_bias": (3, {"x": 1}, {-1: 1.0}, {5: 1000}, {10**9: 1}),
    "eos_token_id": ("x", -5, 10**9, [[]], 1.5),
    "stop_strings": (5, [""], [3]),
    "logprobs": NUMBERS,
    "num_beams": (0, 3, "x"),
    "tree": ("x", "0", "4,0", "1x999", [0], -3, "4@0", "4,4+9"),
    "no_such_option": (1,),
}
FIELDS = {
    **{name: ("x", -1, 10**30, 1.5, True, []) for name in ("max_tokens", "seed", "n", "top_k")},
    **{name: ("x", -3, 10**30, True, []) for name in ("temperature", "top_p", "min_p")},
    **{name: ("x", -9, 10**30, []) for name in ("frequency_penalty", "presence_penalty")},
    "logit_bias": (3, {"x": 1}, {"-1": 1}, {"5": 1000}),
    "stop": (5, [3], ["a"] * 99, ""),
    "logprobs": ("x", -1, 99),
    "prompt": (5, {}, [], "", [10**9], None),
    "model": (5, "no_such_model"),
    "stream": ("x", 5),
    "stream_options": (5, {"include_usage": "x"}),
    "response_format": (5, {"type": "x"}, {"type": "json_schema"}),
    "echo": ("x", 5),
    "best_of": (5, "x"),
    "suffix": (5, "x"),
    "priority": ("x", 1.5),
    "no_such_field": (1,),
}
FLAGS = {
    "infer.decode": {
        **{name: ("x", "-1", "1e99", "") for name in ("max_new_tokens", "temperature", "top_p")},
        **{name: ("x", "-1", "1.5") for name in ("top_k", "seed", "min_p")},
        **{name: ("x", "4,0", "1x999") for name in ("tree", "dtype", "mesh", "attention")},
        **{name: ("/nonexistent", "") for name in ("target", "draft", "prompt_file")},
        "no_such_flag": ("1",),
    },
    "infer.serve": {
        "port": ("x", "-1", "70000"),
        "tree": ("x", "4,0"),
        "api_key_file": ("/nonexistent",),
        "chat_template": ("/nonexistent",),
        "target": ("/nonexistent",),
        "no_such_flag": ("1",),
    },
    "infer.eval": {"out": ("",), "target": ("/nonexistent",), "no_such_flag": ("1",)},
}
CONFIG = {
    "no_such_field": ("1",),
    "dtype": ("x", "float8"),
    "seed": ("x", "-1", "1.5"),
    "target": ("", "/nonexistent"),
    **{f"draft.{name}": ("x", "-1", "1.5") for name in ("window", "kind")},
    **{f"mesh.{name}": ("x", "-1", "99") for name in ("fsdp", "tp", "data")},
    **{f"optimizer.{name}": ("x", "-1", "nan") for name in ("b1", "b2", "eps", "clip")},
    **{
        f"stages.short.{name}": ("x", "-1", "nan", "1.5")
        for name in ("seq_len", "batch", "accumulation", "steps", "epochs", "learning_rate")
    },
    "data.files": ("", "/nonexistent"),
    "save_every": ("x", "-1"),
    "accept_rows": ("x", "-1"),
}


def recorded(folder: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    """Every wanted way in: refusals by field and value."""
    ways = {
        "python": lambda: _python(folder),
        "http": _http,
        "config": _config,
        **{f"flags {module}": lambda module=module: _flags(module) for module in FLAGS},
    }
    for way, refusals in ways.items():
        if wanted(way):
            for name, found in refusals():
                yield f"{way}: {name}", found


def _python(folder: Path) -> Iterator[tuple[str, Any]]:
    spec = LongSpec.from_pretrained(folder / "llama", "ngram", dtype="float32", prefill_chunk=64)
    for name, values in OPTIONS.items():
        for value in values:
            given: Any = {"max_new_tokens": 2, "tree": "1,1", name: value}
            try:
                spec.check([[3, 4]], **given)
                found = ["taken", False]
            except Exception as error:
                found = [type(error).__name__, name in str(error)]
            yield f"{name}={value!r}", found


def _command(module: str, *argv: str) -> tuple[Any, str]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            status = importlib.import_module(module).main(list(argv))
        except SystemExit as end:
            status = end.code
    return status, said.getvalue()


def _flags(module: str) -> Iterator[tuple[str, Any]]:
    place = f"{module}.__main__" if module != "infer.decode" else module
    for name, values in FLAGS[module].items():
        for value in values:
            status, said = _command(place, f"--{name}={value}")
            yield f"--{name}={value}", [status, name in said]


def _config() -> Iterator[tuple[str, Any]]:
    for name, values in CONFIG.items():
        for value in values:
            typed = f"--config.{name}={value}"
            status, said = _command(
                "train.run", "--config=configs/vicuna7b.py:short", typed, "--workdir=/dev/null/x"
            )
            yield typed, [status, name.rsplit(".", 1)[-1] in said]


def _http() -> Iterator[tuple[str, Any]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "infer.serve", f"--port={port}"])
    try:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline and server.poll() is None:
            with contextlib.suppress(OSError):
                if _ask(port, "GET", "/health", None)[0] == 200:
                    break
            time.sleep(0.5)
        for name, values in FIELDS.items():
            for value in values:
                body = {"prompt": "a", "max_tokens": 1, name: value}
                status, answer = _ask(port, "POST", "/v1/completions", body)
                error = answer.get("error") or {} if isinstance(answer, dict) else {}
                yield f"{name}={value!r}", [status, error.get("param")]
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/no_such_path"):
            for body in ({}, {"messages": 3}, {"messages": [{"role": "x", "content": 3}]}, []):
                yield f"{path} {body}", _ask(port, "POST", path, body)[0]
    finally:
        server.terminate()
        server.wait(60)


def _ask(port: int, method: str, path: str, body: Any) -> tuple[int, Any]:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        link.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        answer = link.getresponse()
        text = answer.read()
    finally:
        link.close()
    with contextlib.suppress(ValueError):
        return answer.status, json.loads(text)
    return answer.status, None
