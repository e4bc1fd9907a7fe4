"""What a request must bring before anything of it is looked at: the key, or a host that is ours.

Without a key a server trusts whoever reaches it. A page of another site reaches a server on its
reader's machine, but its browser does not let it read the answers, unless the site's own name leads
to that machine: names of a domain may point anywhere (DNS rebinding). Such a request still names
the site in its header Host.
"""

import base64
import contextlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from longspec_jax.checks import shown

from .answers import json_bytes
from .protocol import Refused

HEALTH, PAGE = "/health", "/"
CLIENT = "longspec.client"
"""In the scope of a request: the place of its key among the server's."""
PRIVATE = ".localhost", ".local", ".internal"
"""Ends of names that no public DNS has, beside those without a dot."""


def refusal(refused: Refused) -> Response:
    """A refusal in OpenAI's error shape."""
    headers = {} if refused.retry_after is None else {"retry-after": str(refused.retry_after)}
    return as_json(refused.body, refused.status, headers)


def as_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
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
