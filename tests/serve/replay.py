"""A server without a model for tests of the page: it replays streams in the documented format."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from infer.serve.app import page_response

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><b>&amp;"
"""What a model may say."""
DEEP = 9
"""Accepted tokens of the third round: deeper than there are shades."""
CHAIN = [" deep", *(f" {depth}" for depth in range(2, DEEP + 1))]


def _token(id: int, text: str, depth: int = 0) -> dict[str, Any]:
    return {"id": id, "text": text, "drafted": depth > 0, "depth": depth}


def _round(number: int, words: list[str], accepted: int, tree: Any = None) -> dict[str, Any]:
    """A round, or the prefill as number 0, with its tokens."""
    tokens = [
        _token(100 * number + index, word, index + 1 if index < accepted else 0)
        for index, word in enumerate(words)
    ]
    return {"number": number, "accepted": accepted, "tokens": tokens, "tree": tree}


def _told(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """What a chunk says of rounds."""
    return {
        "index": 0,
        "tokens": [token for each in rounds for token in each["tokens"]],
        "rounds": [
            {"accepted": each["accepted"], "tree": each["tree"]}
            for each in rounds
            if each["number"]
        ],
    }


ROUNDS = [
    _round(0, ["The"], 0),
    _round(
        1,
        [" cat", HOSTILE, " sat"],
        2,
        {
            "tokens": ["The", " cat", " dog", HOSTILE, " ran", "unused"],
            "parents": [-1, 0, 0, 1, 1, -1],
            "path": [0, 1, 3],
            "draws": [" cat", HOSTILE, " barks", " sat", " far", "unused"],
        },
    ),
    _round(
        2,
        ["\n"],
        0,
        {
            "tokens": [" sat", " on", " down"],
            "parents": [-1, 0, 0],
            "path": [0],
            "draws": ["\n", " it", " low"],
        },
    ),
    _round(
        3,
        [*CHAIN, " low"],
        DEEP,
        {
            "tokens": ["\n", *CHAIN, " lower"],
            "parents": list(range(-1, DEEP + 1)),
            "path": list(range(DEEP + 1)),
            "draws": [*CHAIN, " low", " down"],
        },
    ),
    # A stop token ends the text, and the bonus is not emitted.
    _round(
        4,
        [" end"],
        1,
        {"tokens": [" low", " end"], "parents": [-1, 0], "path": [0, 1], "draws": [" end", "</s>"]},
    ),
]
TOKENS = [token for each in ROUNDS for token in each["tokens"]]
TEXT = "".join(token["text"] for token in TOKENS)
STATS: dict[str, Any] = {
    "running": 2,
    "waiting": 3,
    "slots": 4,
    "tokens_per_second": 88.125,
    "trees": [
        {"drafter": "longspec", "tree": "1,1", "rounds": 1200},
        {"drafter": "plain", "tree": None, "rounds": 34},
    ],
    "rows": [
        {"prompt_tokens": 812, "tokens": 41, "accepted": [1, 2, 0, 2]},
        {"prompt_tokens": 12, "tokens": 1, "accepted": []},
    ],
}


def _plain_rounds(differ: bool) -> list[dict[str, Any]]:
    """The same tokens, one a round; the third is another where the twin is to differ."""
    tokens = [_token(token["id"], token["text"]) for token in TOKENS]
    if differ:
        tokens[2] = _token(999, " other")
    return [
        {"number": number, "accepted": 0, "tokens": [token], "tree": None}
        for number, token in enumerate(tokens)
    ]


@dataclass
class Replay:
    """A server on a free port of this machine. The last message decides how it behaves."""

    chat: bool = True
    key: str = ""
    address: str = ""
    bodies: list[Any] = field(default_factory=list)
    """Of all completion requests."""
    polls: int = 0
    """Requests for ``/stats``."""
    foreign: list[str] = field(default_factory=list)
    """Paths that no route has."""
    gone: int = 0
    """Streams that the client left."""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", lambda _: page_response()),
                Route("/v1/models", self._models),
                Route("/stats", self._stats),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/{path:path}", self._other),
            ]
        )

    def _refused(self, request: Request) -> Response | None:
        if not self.key or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "no key", "type": "x"}}, 401)

    async def _models(self, request: Request) -> Response:
        own = {"chat": self.chat, "max_model_len": 512, "tree": "1,1", "drafter": "longspec"}
        own["identical"] = True
        models = {"object": "list", "data": [{"id": "toy", "object": "model", "longspec": own}]}
        return self._refused(request) or JSONResponse(models)

    async def _stats(self, request: Request) -> Response:
        self.polls += 1
        tree, plain = STATS["trees"]
        trees = [
            {**tree, "rounds": 1200 + 30 * self.polls},
            {**plain, "rounds": 34 + self.polls * 10},
        ]
        return self._refused(request) or JSONResponse({**STATS, "trees": trees})

    async def _other(self, request: Request) -> Response:
        self.foreign.append(request.url.path)
        return Response(status_code=404)

    async def _complete(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        body = await request.json()
        self.bodies.append(body)
        asked = body["messages"][-1]["content"] if self.chat else body["prompt"]
        if asked == "full":
            error = {"message": "64 requests are waiting", "type": "rate_limit", "code": None}
            return JSONResponse({"error": error}, 429, {"Retry-After": "7"})
        plain = body["longspec"].get("speculation") is False
        if asked == "alone" and plain:
            error = {"message": "the twin is refused", "type": "invalid_request_error"}
            return JSONResponse({"error": error}, 400)
        rounds = _plain_rounds("differ" in asked) if plain else ROUNDS
        return StreamingResponse(self._stream(asked, rounds), media_type="text/event-stream")

    async def _stream(self, asked: str, rounds: list[dict[str, Any]]) -> AsyncIterator[bytes]:
        # Chunks hold several rounds where the reader was slow.
        groups = [rounds[:2], rounds[2:3], *([each] for each in rounds[3:])]
        for index, group in enumerate(groups):
            text = "".join(token["text"] for each in group for token in each["tokens"])
            for part in _halves(self._chunk(text, None, longspec=_told(group))):
                yield part
                await asyncio.sleep(0)
            if index == 1 and asked == "error":
                yield _data({"error": {"message": "the target's logits were not finite"}})
                yield b"data: [DONE]\n\n"
                return
            if index == 1 and asked == "broken":
                return
            if index == 1 and asked.startswith("wait"):
                try:
                    await asyncio.sleep(30)
                finally:
                    self.gone += 1
        yield b": a comment\n\n" + _data(self._chunk("", "stop"))
        usage = {"prompt_tokens": 12, "completion_tokens": len(TOKENS)}
        details = {"prompt_tokens_details": {"cached_tokens": 8}}
        yield _data({"choices": [], "usage": {**usage, **details}})
        yield b"data: [DONE]\n\n"

    def _chunk(self, text: str, finish: str | None, **more: Any) -> dict[str, Any]:
        said = {"delta": {"content": text}} if self.chat else {"text": text}
        return {"choices": [{"index": 0, **said, "finish_reason": finish}], **more}


def _data(chunk: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()


def _halves(chunk: dict[str, Any]) -> tuple[bytes, bytes]:
    """An event in two parts, as a network may cut it."""
    data = _data(chunk)
    return data[: len(data) // 2], data[len(data) // 2 :]


@contextmanager
def replaying(**options: Any) -> Iterator[Replay]:
    """Serve in a thread."""
    replay = Replay(**options)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        replay.address = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        config = uvicorn.Config(replay.app(), log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield replay
        finally:
            server.should_exit = True
            thread.join()
