"""What a request must bring before its fields are read: a key or a host of ours, and bounded JSON.

Without a key a server answers everyone who reaches it. A page of another site reaches a server on
its reader's machine, but its browser does not let it read the answers, unless the site's own name
leads to that machine: names of a domain may point anywhere (DNS rebinding). Such a request still
names the site in its header Host.

Python parses JSON without letting go of its interpreter lock: the event loop, and so every stream
and ``/health``, stands still meanwhile. Half a million numbers take a tenth of a second. So the
bytes of a body are bounded by what prompts can need before it is read, and its values are counted
before it is parsed.
"""

import base64
import contextlib
import hmac
import ipaddress
import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from longspec_jax.checks import shown
from longspec_jax.weights.json_files import unique_keys

from .answers import json_bytes
from .fields import Refused

HEALTH, PAGE = "/health", "/"
CLIENT = "longspec.client"
"""In the scope of a request: the place of its key among the server's."""
PRIVATE = ".localhost", ".local", ".internal"
"""Ends of names that no public DNS has, besides those without a dot."""

MOST_BYTES = 32 * 2**20
"""Of any body."""
PROMPTS = 64
"""Of a body, each as long as the context: as many as the queue holds."""
TOKEN_BYTES = 16
"""Of a token in a body. English has 4 to 5, a token id up to 8, and Chinese, whose characters a
client may write as ``\\u4e2d``, 6 to 12."""
OTHER_BYTES, OTHER_VALUES = 2**20, 2**17
"""Of all that is not a prompt: the frame of messages, a JSON schema, biases."""
MOST_VALUES, MOST_STRINGS, MOST_CONTAINERS = 2**19, 2**18, OTHER_VALUES
"""Of a body: token ids besides those of one whole prompt, texts and names, lists and objects."""
LONGEST_NUMBER = 100
"""Characters: Python reads a number in the time of their square."""
DEEPEST = 40
"""Objects and lists within each other; a JSON schema takes two for each level of its texts."""


def refusal(refused: Refused) -> Response:
    """A refusal in OpenAI's error shape."""
    headers = {} if refused.retry_after is None else {"retry-after": str(refused.retry_after)}
    return as_json(refused.body, refused.status, headers)


def as_json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(json_bytes(value), status, headers, "application/json")


class KeyGuard:
    """Lets requests pass that carry a key, and those to ``/health``; notes which key it is.

    As ``Bearer KEY``, or as the password of any user, for which a browser asks when it opens the
    page, and which it then sends along with the page's own requests.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 without a key."""
        if scope["type"] != "http" or scope["path"] == HEALTH:
            await self._app(scope, receive, send)
            return
        if (place := self._place_of_key(scope)) is not None:
            await self._app({**scope, CLIENT: place}, receive, send)
            return
        refused = Refused(
            "the API key is missing or wrong; send the header Authorization: Bearer KEY",
            status=401,
            code="invalid_api_key",
        )
        response = refusal(refused)
        page = scope["path"] == PAGE
        response.headers["www-authenticate"] = 'Basic realm="API key"' if page else "Bearer"
        await response(scope, receive, send)

    def _place_of_key(self, scope: Scope) -> int | None:
        scheme, _, key = _header(scope, b"authorization").partition(b" ")
        if scheme.lower() == b"basic":
            with contextlib.suppress(ValueError):
                scheme, key = b"bearer", base64.b64decode(key).partition(b":")[2]
        # compare_digest takes a time that does not tell how much of the key was right; and all keys
        # are compared, whichever it is.
        same = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return same.index(True) if any(same) and scheme.lower() == b"bearer" else None


class HostGuard:
    """Lets requests pass that name a host of ours, and those to ``/health``, where there is no key.

    Ours are addresses, names that no public DNS has, and the one that the server was started with.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app, self._host = app, host.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403 to others."""
        if scope["type"] != "http" or scope["path"] == HEALTH or self._is_own(_name(scope)):
            await self._app(scope, receive, send)
            return
        refused = Refused(
            f"the header Host names {shown(_name(scope))}, by which a page of another site could "
            "reach this server, which has no API key; use its address or localhost, start it with "
            "--api_key_file=FILE or with --host and that name, or have the proxy send a name "
            "without dots",
            status=403,
        )
        await refusal(refused)(scope, receive, send)

    def _is_own(self, name: str) -> bool:
        if name == self._host or "." not in name or name.endswith(PRIVATE):
            return True
        with contextlib.suppress(ValueError):
            return bool(ipaddress.ip_address(name))
        return False


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for known, value in scope["headers"] if known == name), b"")


def _name(scope: Scope) -> str:
    """The name or address in the header Host, without the port."""
    host = _header(scope, b"host").decode("latin-1").lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def most_bytes(max_len: int) -> int:
    """The bytes of a body that a server of this context reads."""
    return min(MOST_BYTES, OTHER_BYTES + PROMPTS * TOKEN_BYTES * max_len)


def most_values(max_len: int) -> int:
    """The values of a body that a server of this context parses."""
    return OTHER_VALUES + max_len + min(MOST_VALUES, (PROMPTS - 1) * max_len)


def too_large(max_len: int) -> Refused:
    """The refusal of a body of too many bytes."""
    return Refused(
        f"the body has more than {most_bytes(max_len)} bytes, which are {TOKEN_BYTES} for each "
        f"token of {PROMPTS} prompts of {max_len} tokens, {OTHER_BYTES} for the rest, and at most "
        f"{MOST_BYTES}; send less: fewer prompts, or shorter ones",
        status=413,
    )


def read_json(body: bytes | bytearray, max_len: int) -> dict[str, Any]:
    """The object that a body holds.

    Args:
      max_len: most tokens of a prompt and its answer.

    Raises:
      Refused: for anything else, and for an object that is too large or nested too deeply.
    """
    if len(body) > most_bytes(max_len):
        raise too_large(max_len)
    if len(body) > OTHER_VALUES:  # A smaller one cannot hold too many values.
        _check_values(body, most_values(max_len))
    try:
        # JSON is UTF-8. Python would also take UTF-16, in which values are not counted.
        text = body.decode("utf-8")
        found = json.loads(
            text,
            parse_int=_whole,
            parse_float=_real,
            parse_constant=_no_constant,
            object_pairs_hook=unique_keys,
        )
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # UnicodeDecodeError is one, and a number of too many digits, too.
        raise Refused(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Refused(f"the body must be a JSON object, got {shown(found)}")
    level: list[Any] = [found]
    for _ in range(DEEPEST):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return found
    raise _too_deep()


def _check_values(body: bytes | bytearray, most: int) -> None:
    """Refuse a body of too many values, by its commas and brackets outside of texts.

    What is no JSON is counted somehow: the parser ends where it stops being JSON.
    """
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    strings, containers, values = bare.count(b'"') // 2, 0, 0
    if strings <= MOST_STRINGS:
        outside = b"".join(bare.split(b'"')[::2])
        containers = outside.count(b"[") + outside.count(b"{")
        values = containers + outside.count(b",")
    for count, limit, name in (
        (strings, MOST_STRINGS, "texts and names"),
        (containers, MOST_CONTAINERS, "lists and objects"),
        (values, most, "values"),
    ):
        if count > limit:
            raise Refused(
                f"the body has {count} {name}, and a request may have {limit}; send fewer prompts, "
                "messages or parts in each",
                status=413,
            )


def _too_deep() -> Refused:
    return Refused(f"the body is nested more than {DEEPEST} levels deep; flatten it")


def _whole(digits: str) -> int:
    return int(_short(digits))


def _real(digits: str) -> float:
    return float(_short(digits))


def _short(digits: str) -> str:
    if len(digits) > LONGEST_NUMBER:
        raise ValueError(f"a number has more than {LONGEST_NUMBER} characters")
    return digits


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
