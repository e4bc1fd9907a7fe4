"""The routes: requests in, answers and streams out, and what guards them.

The application knows the engine's thread only by its handles. It never blocks the event loop:
bodies are parsed by one thread of their own, and texts are tokenised by a few.
"""

import asyncio
import base64
import contextlib
import hashlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from . import metrics as metrics_lib
from .answers import DONE, Writer, event, is_long, json_bytes, long_json_bytes
from .calls import Call, Row, ServedModel, read_call, read_detokenize, read_tokenize, rows_of
from .engine_thread import EngineThread, State
from .fields import Refused, defect
from .guards import (
    CLIENT,
    HEALTH,
    MOST_BYTES,
    PAGE,
    HostGuard,
    KeyGuard,
    as_json,
    most_bytes,
    read_json,
    refusal,
    too_large,
)
from .messages import MessageReader
from .metrics import Metrics
from .openapi import GETS, POSTS, describe
from .protocol import Chat, Completion
from .streaming import RequestHandle, TokenTexts

LOG = logging.getLogger("longspec.serve")
CLIENT_GONE = 499
"""Written to the log where nobody reads the answer."""
BODY_SECONDS = 60.0
"""In which a client must have sent its request."""
MOST_HELD, MOST_CONVERTED = 8 * MOST_BYTES, 2 * MOST_BYTES
"""Bytes of bodies that are read and not yet tokenised: of completions together, and of the routes
that only convert texts."""
PULSE = 15.0
"""Seconds without an event after which a stream sends a comment: proxies cut what is silent."""
TOKENISERS, COMPILERS, WRITERS = 2, 1, 2
"""Threads for texts, for requests with a form or tools, whose grammars may take seconds, and for
answers, which do not wait for the texts of other requests."""
FORMS = {"tools", "response_format"}
"""Fields from which grammars are made."""
Found = TypeVar("Found")
Given = TypeVarTuple("Given")


@dataclass(frozen=True)
class Served:
    """What the routes answer with."""

    model: ServedModel
    thread: EngineThread
    metrics: Metrics
    slots: int = 1
    created: int = 0
    api_keys: tuple[str, ...] = ()
    """What clients may send; none for no key. The first one is the operator's."""
    host: str = ""
    """That the server was started with."""
    log_prompts: bool = False


def make_app(served: Served) -> ASGIApp:
    """The application of a server."""
    routes = Routes(served)
    handlers = {
        "/v1/completions": partial(routes.complete, chat=False),
        "/v1/chat/completions": partial(routes.complete, chat=True),
        "/v1/models": routes.models,
        "/tokenize": routes.tokenize,
        "/detokenize": routes.detokenize,
        HEALTH: routes.health,
        "/metrics": routes.metrics,
        "/stats": routes.stats,
        "/openapi.json": routes.openapi,
        PAGE: routes.page,
    }
    app = Starlette(
        routes=[
            *(Route(path, handlers[path], methods=["POST"]) for path in POSTS),
            *(Route(path, handlers[path]) for path in GETS),
            Route("/v1/models/{name:path}", routes.models),
        ],
        exception_handlers={
            Refused: _refused,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
            Exception: _failed,
        },
    )
    if not served.api_keys:
        return HostGuard(app, served.host)
    return KeyGuard(app, served.api_keys)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    LOG.info("%s %r %d: refused", request.method, request.url.path, error.status)
    return refusal(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router refuses."""
    assert isinstance(error, HTTPException)
    words = {
        404: f"there is no {request.url.path}; see /openapi.json. A client's base URL ends with "
        "/v1, once; of OpenAI's routes there are completions, chat/completions and models",
        405: f"{request.url.path} does not take {request.method}; see /openapi.json",
    }
    response = refusal(
        Refused(words.get(error.status_code, error.detail), status=error.status_code)
    )
    response.headers.update(error.headers or {})
    return response


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _failed(request: Request, error: Exception) -> Response:
    """A defect of the server; its traceback goes to the log."""
    return refusal(defect(error))


@dataclass
class Held:
    """Bodies that requests have sent and that are not yet tokenised."""

    most: int
    bytes: int = 0

    def add(self, count: int) -> None:
        """Count bytes that have come.

        Raises:
          Refused: for more than there may be.
        """
        self.bytes += count
        if self.bytes > self.most:
            raise Refused(
                f"{self.most} bytes of other requests are being read; try again later",
                status=429,
                code="queue_full",
                retry_after=1,
            )


class Events(StreamingResponse):
    """A stream of events that ends its call when nobody reads it any more."""

    def __init__(self, events: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


class Routes:
    """The handlers."""

    def __init__(self, served: Served) -> None:
        """Bind what they answer with."""
        self._served, self._model, self._thread = served, served.model, served.thread
        model = served.model
        self._texts = TokenTexts(model.decode, model.stored_bytes, model.special)
        self._pool = ThreadPoolExecutor(TOKENISERS, thread_name_prefix="tokenize")
        self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="write")
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="compile")
        # One: parsing keeps all other threads waiting, the event loop's too.
        self._parser = ThreadPoolExecutor(1, thread_name_prefix="parse")
        # Texts that are only converted are free to send: no completion waits for them.
        self._converter = ThreadPoolExecutor(1, thread_name_prefix="convert")
        self._held, self._converted = Held(MOST_HELD), Held(MOST_CONVERTED)
        self._document = json_bytes(describe(bool(served.api_keys)))

    async def complete(self, request: Request, chat: bool) -> Response:
        """Completions of both kinds, whole or as a stream."""
        self._thread.check_room()
        client = str(request.scope[CLIENT]) if len(self._served.api_keys) > 1 else ""
        loop = asyncio.get_running_loop()
        async with self._body(request, self._held) as given:
            # Whoever sends grammars waits for those of others; who sends texts does not.
            pool = self._compilers if given.keys() & FORMS else self._pool
            reading = loop.run_in_executor(pool, self._read_call, given, chat, client)
            # What a client that has left still has in the queue of the pool leaves with it.
            if await until_gone(request, reading):
                return Response(status_code=CLIENT_GONE)
        call, rows = reading.result()
        if self._served.log_prompts:
            turns = [one.turn for one in call.messages] if isinstance(call, Chat) else call.prompt
            LOG.info("prompt: %s", turns)
        handle = self._thread.submit(rows)
        try:
            writer = self._writer(call, handle)
            if await until_gone(request, handle.begun()):
                return Response(status_code=CLIENT_GONE)
            if call.stream:
                end, stream = partial(self._close, request, call, handle, 200), handle
                handle = None
                return Events(pulsing(self._events(writer, stream)), end)
            gone = await until_gone(request, _read_all(handle))
            self._log(request, call, handle, CLIENT_GONE if gone else 200)
            if gone:
                return Response(status_code=CLIENT_GONE)
            # Log-probabilities of a long prompt take a while to write.
            body = await self._written(lambda: long_json_bytes(writer.body()))
            return Response(body, media_type="application/json")
        finally:
            if handle is not None:
                self._thread.cancel(handle)

    def _read_call(
        self, given: dict[str, Any], chat: bool, client: str
    ) -> tuple[Call, tuple[Row, ...]]:
        call = read_call(given, self._model, chat=chat)
        return call, rows_of(call, self._model, client)

    def _writer(self, call: Call, handle: RequestHandle) -> Writer:
        if isinstance(call, Completion) and call.echo:
            for index, answer in enumerate(handle.answers):
                prompt = call.prompt[index // call.n]
                # The caller's own string, which tokens may not give back.
                answer.echoed = prompt if isinstance(prompt, str) else self._model.decode(prompt)
        model = self._model
        return Writer(
            call,
            model.names[0],
            handle.answers,
            [MessageReader(row.reading) for row in handle.rows],
            self._texts,
            sources=model.sources,
            accepted_only=model.shared,
        )

    async def _events(self, writer: Writer, handle: RequestHandle) -> AsyncIterator[bytes]:
        """The events of a call; ``[DONE]`` comes last, after an error if there is one."""
        try:
            yield writer.opening()
            async for row, gain in handle.gains():
                if is_long(gain):
                    events = await self._written(writer.events, row, gain)
                else:
                    events = writer.events(row, gain)
                if events:
                    yield events
            yield writer.ending()
        except Refused as refused:
            yield event(refused.body) + DONE
        except Exception as error:
            LOG.exception("a stream has failed")
            yield event(defect(error).body) + DONE

    def _close(self, request: Request, call: Call, handle: RequestHandle, status: int) -> None:
        self._log(request, call, handle, status)
        self._thread.cancel(handle)

    def _log(self, request: Request, call: Call, handle: RequestHandle, status: int) -> None:
        LOG.info(
            "%s %r %d: %d prompt tokens, %d new, %s",
            request.method,
            request.url.path,
            status,
            sum(len(row.tokens) for row in handle.rows),
            sum(answer.new for answer in handle.answers),
            "stream" if call.stream else "whole",
        )

    async def models(self, request: Request) -> Response:
        """The model under each of its names, or one of them."""
        entries = [
            {
                "id": name,
                "object": "model",
                "created": self._served.created,
                "owned_by": "longspec",
                "max_model_len": self._model.max_len,
                "longspec": self._model.about,
            }
            for name in self._model.names
        ]
        if (name := request.path_params.get("name")) is None:
            return as_json({"object": "list", "data": entries})
        found = next((entry for entry in entries if entry["id"] == name), None)
        if found is None:
            message = f"the model {name!r:.80} does not exist; see /v1/models"
            raise Refused(message, "model", status=404, code="model_not_found")
        return as_json(found)

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or of messages."""

        def found(given: dict[str, Any]) -> dict[str, Any]:
            tokens, texts = read_tokenize(given, self._model)
            own = {"count": len(tokens), "max_model_len": self._model.max_len, "tokens": tokens}
            return {**own, "token_strs": [*map(self._texts, tokens)]} if texts else own

        return await self._convert(request, found)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        decode = self._model.decode
        return await self._convert(
            request, lambda given: {"prompt": decode(read_detokenize(given, self._model))}
        )

    async def _convert(
        self, request: Request, found: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> Response:
        """What is found in a body, by the thread that only converts."""
        loop = asyncio.get_running_loop()
        async with self._body(request, self._converted) as given:
            converting = loop.run_in_executor(
                self._converter, lambda: long_json_bytes(found(given))
            )
            if await until_gone(request, converting):
                return Response(status_code=CLIENT_GONE)
        return Response(converting.result(), media_type="application/json")

    async def health(self, request: Request) -> Response:
        """200 while requests are taken, else 503."""
        state = self._thread.state
        return as_json({"status": state.value}, 200 if state is State.READY else 503)

    async def metrics(self, request: Request) -> Response:
        """All counts, for Prometheus."""
        self._check_operator(request)
        return Response(self._served.metrics.text(), headers={"content-type": metrics_lib.TYPE})

    async def stats(self, request: Request) -> Response:
        """What the page shows: rows and tokens per second, without texts."""
        self._check_operator(request)
        return as_json({**self._thread.stats(), "slots": self._served.slots})

    def _check_operator(self, request: Request) -> None:
        """Refuse what tells of everybody's requests to all keys but the first.

        Raises:
          Refused: for another one.
        """
        if request.scope.get(CLIENT, 0) > 0:
            raise Refused(
                f"{request.url.path} tells of the requests of all keys; ask with the first key of "
                "--api_key_file, which is the operator's",
                status=403,
            )

    async def openapi(self, request: Request) -> Response:
        """The description of all routes."""
        return Response(self._document, media_type="application/json")

    async def page(self, request: Request) -> Response:
        """The page: one file, which talks to no other server."""
        return page_response()

    @contextlib.asynccontextmanager
    async def _body(self, request: Request, held: Held) -> AsyncIterator[dict[str, Any]]:
        """The JSON object of a request, whose bytes are held until the context ends."""
        body, max_len = bytearray(), self._model.max_len
        try:
            await self._receive(request, held, body)
            loop = asyncio.get_running_loop()
            yield await loop.run_in_executor(self._parser, read_json, body, max_len)
        finally:
            held.bytes -= len(body)

    async def _receive(self, request: Request, held: Held, body: bytearray) -> None:
        """Read the bytes of a request.

        Other types of content are refused: a page of another site can send them without asking.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused(
                f"the body has the type {kind[:80]!r}; send JSON with the header Content-Type: "
                "application/json",
                status=415,
            )
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            raise Refused(
                f"the body has the header Content-Encoding: {encoding[:80]}; send it "
                "uncompressed, without this header",
                status=415,
            )
        most = most_bytes(self._model.max_len)
        if int(request.headers.get("content-length", 0)) > most:
            raise too_large(self._model.max_len)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    held.add(len(part))
                    if len(body) > most:
                        raise too_large(self._model.max_len)
        except TimeoutError:
            raise Refused(f"the body took longer than {BODY_SECONDS:g} s", status=408) from None

    async def _written(self, work: Callable[[*Given], Found], *arguments: *Given) -> Found:
        return await asyncio.get_running_loop().run_in_executor(self._writers, work, *arguments)


async def pulsing(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Events, and comments, which clients skip, while none comes."""
    coming = asyncio.ensure_future(anext(events))
    try:
        while True:
            await asyncio.wait({coming}, timeout=PULSE)
            if not coming.done():
                yield b": waiting\n\n"
                continue
            try:
                yield coming.result()
            except StopAsyncIteration:
                return
            coming = asyncio.ensure_future(anext(events))
    finally:
        coming.cancel()


async def _read_all(handle: RequestHandle) -> None:
    async for row, gain in handle.gains():
        handle.answers[row].gains.append(gain)


async def until_gone(request: Request, work: Awaitable[object]) -> bool:
    """Await something, unless the client leaves first; whether it has left.

    The body must have been read: what comes then is the client's leaving.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return True
        working.result()
        return False
    finally:
        for task in (working, leaving):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


_OPEN = "default-src 'none'; img-src data:; connect-src 'self'; base-uri 'none'; "
_CLOSED = "form-action 'none'; frame-ancestors 'none'"


def page_response() -> Response:
    """The page, which lies next to this file, with a policy that lets only its script run."""
    text = (Path(__file__).parent / "page.html").read_text("utf-8")
    policy = "".join(f"{name}-src {_digest(text, name)}; " for name in ("style", "script"))
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": _OPEN + policy + _CLOSED,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(text.encode(), headers=headers)


def _digest(text: str, element: str) -> str:
    """What a policy calls the only inline style or script of a page."""
    [inside] = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    return f"'sha256-{digest}'"
