"""A server in this process, over an engine that says what a test tells it or over the toy."""

import asyncio
import http.client
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from infer.eval.records import by_round
from infer.serve.app import Served
from infer.serve.calls import ServedModel
from infer.serve.engine_thread import EngineThread
from infer.serve.http_server import HttpServer
from infer.serve.metrics import Metrics
from longspec_jax import LongSpec
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.decoding.slots import EngineStatus
from longspec_jax.generation.result import TreeUse
from longspec_jax.generation.text import RequestOutput
from tests.children import opened
from tests.infer.toys import save_toy

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MAX_LEN = 64
LEVELS = 3


def until(condition: Callable[[], Any], seconds: float = 20) -> None:
    """Wait for what another thread makes true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def scripted_model(**changes: Any) -> ServedModel:
    """Letters are tokens; messages are put after each other."""
    settings: dict[str, Any] = {
        "names": ("toy", "alias"),
        "max_len": MAX_LEN,
        "vocab_size": len(LETTERS),
        "stop_tokens": (25,),
        "most_rows": 16,
        "encode": lambda text, special: [LETTERS.index(letter) for letter in text],
        "decode": lambda tokens: "".join(LETTERS[token] for token in tokens),
        "encode_chat": lambda messages, tools, variables: [
            LETTERS.index(letter) for message in messages for letter in message["content"]
        ],
        "trees": (PLAIN, TreeConfig((1, 1, 1))),
        "tree": "chain:3",
        "drafter": "script",
    }
    return ServedModel(**{**settings, **changes})


def logprob(token: int) -> Any:
    """The entry of a token whose likeliest alternative is the next letter."""
    return SimpleNamespace(logprob=-1.5, top=(((token + 1) % 26, -0.5), (token, -1.5)))


@dataclass
class ScriptedEngine:
    """Answers with the letters after the prompt's last one, two accepted tokens a round.

    ``gate`` holds back all steps, from the first one if ``held``; ``fail`` is raised by the next.
    """

    gate: threading.Event = field(default_factory=threading.Event)
    held: bool = False
    fail: Exception | None = None
    finish: str = "length"
    reason: str | None = None
    submitted: list[tuple[list[int], dict[str, Any]]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    closed: bool = False
    rows: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    """Tokens so far and tokens to come of every open request."""
    trees: Sequence[TreeUse] = ()
    single: threading.Semaphore | None = None
    """A step for each release, where it is given."""

    def __post_init__(self) -> None:
        if not self.held:
            self.gate.set()

    @property
    def busy(self) -> bool:
        return bool(self.rows)

    @property
    def queued(self) -> tuple[int, ...]:
        return ()

    @property
    def status(self) -> EngineStatus:
        numbers: dict[str, Any] = {one.name: 0 for one in fields(EngineStatus)}
        return EngineStatus(**{**numbers, "tokens": 5, "capacity": 10, "prefix_hits": 7})

    def submit(self, inputs: Sequence[int], **options: Any) -> int:
        if options["max_new_tokens"] == 13:
            raise ValueError("max_new_tokens=13 is unlucky; pass another number")
        if options["max_new_tokens"] == 17:
            raise KeyError("an id of another request")
        self.submitted.append(([*inputs], options))
        id = len(self.submitted) - 1
        self.rows[id] = [*inputs], options["max_new_tokens"]
        return id

    def step(self) -> list[Any]:
        if self.single is not None:
            self.single.acquire(timeout=30)
        self.gate.wait(30)
        if self.fail is not None:
            raise self.fail
        found = []
        for id, (tokens, left) in [*self.rows.items()]:
            first = len(tokens) == len(self.submitted[id][0])
            new = [(tokens[-1] + 1 + index) % 25 for index in range(1 if first else min(3, left))]
            left -= len(new)
            finish = self.finish if left == 0 else None
            options = self.submitted[id][1]
            wanted, prompt = options.get("logprobs"), options.get("prompt_logprobs")
            scored = None if not first or prompt is None else (None, *map(logprob, tokens[1:]))
            tree: Any = SimpleNamespace(
                tokens=(tokens[-1], *new[:-1], 0),
                parents=(-1, 0, 1, 2)[: len(new)] + (0,),
                draws=(*new, 1),
                path=(0,),
            )
            found.append(
                RequestOutput(
                    id=id,
                    tokens=tuple(new),
                    text="".join(LETTERS[token] for token in new),
                    drafted=(False,) if first else (*[True] * (len(new) - 1), False),
                    rounds=() if first else (len(new) - 1,),
                    finish=finish,
                    reason=self.reason if finish else None,
                    logprobs=() if wanted is None else tuple(map(logprob, new)),
                    prompt_logprobs=scored,
                    trees=() if first else (tree,),
                    cached_tokens=4 if first else 0,
                )
            )
            self.rows[id] = tokens + new, left
            if finish:
                del self.rows[id]
        return found

    def cancel(self, id: int) -> None:
        self.cancelled.append(id)
        self.rows.pop(id, None)

    def close(self) -> None:
        self.closed = True


class GeneratingEngine(ScriptedEngine):
    """Answers every request whole, by ``generate``."""

    def __init__(self, spec: LongSpec) -> None:
        super().__init__()
        self.spec = spec

    def step(self) -> list[Any]:
        found = []
        for id in [*self.rows]:
            del self.rows[id]
            prompt, options = self.submitted[id]
            options = dict(options)
            plain = PLAIN if not options.pop("speculate", True) else None
            one = self.spec.generate([prompt], tree=plain, **options)
            [tokens], [drafted] = one.sequences, one.drafted
            stops = options.get("eos_token_id", self.spec.stop_tokens)
            found.append(
                RequestOutput(
                    id=id,
                    tokens=tokens,
                    text=one.text[0] or "",
                    drafted=drafted,
                    rounds=by_round(drafted)[1],
                    finish="stop" if tokens[-1] in stops else "length",
                )
            )
        return found


def model_of(spec: LongSpec) -> ServedModel:
    """What requests to a server of these models are checked against."""
    return scripted_model(
        max_len=spec.target_config.max_positions,
        vocab_size=spec.target_config.vocab_size,
        stop_tokens=spec.stop_tokens,
        decode=spec.tokenizer.decode,
    )


@dataclass
class Client:
    """A server and how to ask it."""

    port: int
    server: HttpServer
    thread: EngineThread
    key: str | None = None
    timeout: float = 30.0
    status: list[int] = field(default_factory=list)
    """The exit status, once it has ended."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """An open response, whose connection is its attribute ``connection``."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.timeout)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        own = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        kind = {} if data is None else {"Content-Type": "application/json"}
        connection.request(method, path, data, {**own, **kind, **headers})
        response = connection.getresponse()
        response.connection = connection  # type: ignore[attr-defined]
        return response

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        response, data = self.answer(method, path, body, **headers)
        return response.status, json.loads(data) if data else None

    def answer(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[Any, bytes]:
        """A response that has been read, and its bytes."""
        response = self.connect(method, path, body, **headers)
        data = response.read()
        response.connection.close()
        return response, data

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        return self.ask("POST", path, body)

    def stream(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream, each as JSON, ``[DONE]`` as it is."""
        response = self.connect("POST", path, {**body, "stream": True})
        assert response.getheader("content-type").startswith("text/event-stream")
        return [*events(response)]


def events(response: Any) -> Iterator[Any]:
    for line in response:
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ").strip()
            yield "[DONE]" if data == b"[DONE]" else json.loads(data)


@contextmanager
def serving(
    engine: Any,
    model: ServedModel | None = None,
    *,
    queue_requests: int = 16,
    queue_tokens: int = 1000,
    request_seconds: float | None = None,
    drain_seconds: float = 20.0,
    api_key: str | None = None,
    other_keys: tuple[str, ...] = (),
    host: str = "",
    levels: int = LEVELS,
    send_buffer: int | None = None,
) -> Iterator[Client]:
    """A server on a port of its own, in a thread; ended in the end."""
    metrics = Metrics(levels)
    thread = EngineThread(
        engine,
        metrics,
        queue_requests=queue_requests,
        queue_tokens=queue_tokens,
        request_seconds=request_seconds,
        levels=levels,
    )
    keys = () if api_key is None else (api_key, *other_keys)
    served = Served(model or scripted_model(), thread, metrics, api_keys=keys, host=host)
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:  # Which connections inherit.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server, ready = HttpServer(served, listener, drain_seconds), threading.Event()
    client = Client(listener.getsockname()[1], server, thread, api_key)

    def run() -> None:
        client.status.append(asyncio.run(server.run(ready.set)))

    running = threading.Thread(target=run, name="server")
    running.start()
    try:
        assert ready.wait(30)
        yield client
    finally:
        server.stop()
        running.join(30)
        assert not running.is_alive()


@contextmanager
def child(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A server of the toy in a process of its own, and the lines that say it is ready.

    The test has to end it. It must exit with status 0 and without a traceback.
    """
    target, draft = save_toy(folder)
    given = [f"--target={target}", f"--draft={draft}", "--tree=1", "--prefill_chunk=32"]
    process = opened("-m", "infer.serve", *given, "--max_model_len=256", "--port=0", *options)
    errors, lines = list[str](), list[str]()
    reading = threading.Thread(target=lambda: errors.extend(process.stderr or ()))
    reading.start()
    try:
        for line in process.stdout or ():
            lines.append(line)
            if line.startswith("page:"):
                break
        yield process, lines
        assert process.wait(60) == 0
        reading.join()
        assert not any("Traceback" in line for line in errors), errors
    finally:
        process.kill()
        process.wait()
        reading.join()


def port_of(lines: list[str]) -> int:
    """Of a server that says that it is ready."""
    [ready] = [line for line in lines if line.startswith("ready:")]
    return int(ready.split(":")[-1].split("/")[0])
