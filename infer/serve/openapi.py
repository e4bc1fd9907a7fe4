"""The OpenAPI document of a server, made of the models of its requests."""

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import longspec_jax

from .fields import Body
from .protocol import Chat, Completing, Completion, Detokenize, Tokenize

POSTS: dict[str, tuple[str, type[Body]]] = {
    "/v1/completions": ("Continue prompts", Completion),
    "/v1/chat/completions": ("Answer messages", Chat),
    "/tokenize": ("Token ids of a text or of messages", Tokenize),
    "/detokenize": ("The text of token ids", Detokenize),
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


class ErrorObject(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """A refusal."""

    error: ErrorObject


def describe(has_key: bool) -> dict[str, Any]:
    """The OpenAPI document of a server.

    Args:
      has_key: whether it wants an API key.
    """
    bodies, shared = models_json_schema(
        [*((kind, "validation") for _, kind in POSTS.values()), (Error, "validation")],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {}
    for path, (summary, kind) in POSTS.items():
        answers = {"application/json": {"schema": {"type": "object"}}}
        if issubclass(kind, Completing):
            answers["text/event-stream"] = {"schema": {"type": "string"}}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": bodies[kind, "validation"]}},
                },
                "responses": {
                    "200": {"description": summary, "content": answers},
                    **_refusals(REFUSALS.keys() - {"403"}),
                },
            }
        }
    for path, (summary, content) in GETS.items():
        ok = {"description": summary, "content": {content: {"schema": {}}}}
        responses = {"200": ok, **_refusals(["401", "403", "503"])}
        paths[path] = {"get": {"summary": summary, "responses": responses}}
    for path in ("/", "/health"):
        paths[path]["get"]["security"] = []
    paths["/health"]["get"]["responses"]["503"] = {
        "description": "the server is shutting down, or has failed",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
    keys = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if has_key else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "longspec_jax", "version": longspec_jax.__version__},
        "paths": paths,
        "components": {"schemas": shared["$defs"], **keys},
        "security": [{"key": []}] if has_key else [],
    }


def _refusals(statuses: Iterable[str]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": REFUSALS[status], "content": content} for status in statuses}
