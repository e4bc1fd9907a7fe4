"""What a server says of itself: the OpenAPI document and the page at ``/``.

The document is made of the tables by which requests are read. The page is one file, and the policy
lets a browser run its script and no other.
"""

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import longspec_jax

from .protocol import fields_of
from .rules import Object

POSTS = {
    "/v1/completions": "Continue prompts",
    "/v1/chat/completions": "Answer messages",
    "/tokenize": "Token ids of a text or of messages",
    "/detokenize": "The text of token ids",
}
GETS = {
    "/v1/models": ("The served model", "application/json"),
    "/health": ("Whether requests are taken", "application/json"),
    "/metrics": ("Counts, for Prometheus", "text/plain"),
    "/stats": ("Rows and tokens per second", "application/json"),
    "/openapi.json": ("This document", "application/json"),
    "/": ("A page to try the model and to watch it", "text/html"),
}
REFUSALS = {
    "400": "a field is wrong; the message names it",
    "401": "the API key is missing or wrong",
    "403": "of several keys this is not the operator's; or there is no key, and the header Host "
    "names another site",
    "404": "there is no such model",
    "408": "the body took too long to send",
    "413": "the body is too large",
    "415": "the body is not JSON, or it is compressed",
    "429": "the queue is full; Retry-After says when to try again",
    "500": "the server has a defect",
    "503": "the server is shutting down",
    "504": "the request took too long",
}
STREAMED = {"/v1/completions", "/v1/chat/completions"}
_NULLABLE = ["string", "null"]
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": _NULLABLE},
                "code": {"type": _NULLABLE},
            },
        }
    },
}


def describe(has_key: bool) -> dict[str, Any]:
    """The document of a server.

    Args:
      has_key: whether it wants an API key.
    """
    paths: dict[str, Any] = {path: {"post": _post(path)} for path in POSTS}
    for path, (summary, kind) in GETS.items():
        ok = {"description": summary, "content": {kind: {"schema": {}}}}
        responses = {"200": ok, **_refusals("401", "403", "503")}
        paths[path] = {"get": {"summary": summary, "responses": responses}}
    for path in ("/", "/health"):
        paths[path]["get"]["security"] = []
    for path in ("/metrics", "/stats"):
        paths[path]["get"]["responses"] |= _refusals("403")
    paths["/health"]["get"]["responses"]["503"] = {
        "description": "the server is shutting down, or has failed",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
    scheme = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "longspec_jax", "version": longspec_jax.__version__},
        "paths": paths,
        "components": {"schemas": {"Error": ERROR}, "securitySchemes": scheme if has_key else {}},
        "security": [{"key": []}] if has_key else [],
    }


def _post(path: str) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path in STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    body = {"application/json": {"schema": Object(fields_of(path)).schema}}
    return {
        "summary": POSTS[path],
        "requestBody": {"required": True, "content": body},
        "responses": {
            "200": {"description": POSTS[path], "content": content},
            **_refusals(*(REFUSALS.keys() - {"403"})),
        },
    }


def _refusals(*statuses: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": REFUSALS[status], "content": content} for status in statuses}


_OPEN = "default-src 'none'; img-src data:; connect-src 'self'; base-uri 'none'; "
_CLOSED = "form-action 'none'; frame-ancestors 'none'"


@dataclass(frozen=True)
class Page:
    """What ``GET /`` answers."""

    body: bytes
    """HTML in UTF-8."""
    headers: dict[str, str]
    """Content type, policy and what else a browser must know."""


def read_page() -> Page:
    """Read the page, which lies beside this file."""
    text = (Path(__file__).parent / "page.html").read_text("utf-8")
    policy = "".join(f"{name}-src {_digest(text, name)}; " for name in ("style", "script"))
    return Page(
        body=text.encode(),
        headers={
            "content-type": "text/html; charset=utf-8",
            "content-security-policy": _OPEN + policy + _CLOSED,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        },
    )


def _digest(text: str, element: str) -> str:
    """What a policy calls the only inline style or script of a page."""
    [inside] = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    return f"'sha256-{digest}'"
