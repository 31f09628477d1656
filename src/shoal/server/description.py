"""The OpenAPI description at ``/openapi.json``, which ``/docs`` shows.

Bodies are read by ``body``, ``encoding`` and ``validation`` rather than by FastAPI, for their errors; so they are
described here, from the same models that validate them.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from shoal.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from shoal.server.responses import ChatChunk, ErrorResponse

_REFERENCE = "#/components/schemas/{model}"
# Before OpenAPI 3.2 the schema of a stream describes each of its events.
_EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
_BODIES = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
_POST_ERRORS = {
    400: "Something in the request is wrong; param names it.",
    404: "Another model's name.",
    413: "The body is too large.",
    415: "The body is not sent as application/json.",
    429: "The queue is full; Retry-After says when to try again.",
    500: "The request failed.",
    503: "Requests are not taken now.",
}


def reading(body: type[BaseModel], answer: type[BaseModel], *, streams: bool = False) -> dict[str, Any]:
    """Arguments of a route that reads a body."""
    schema = {"$ref": _REFERENCE.format(model=body.__name__)}
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
        "responses": {200: _success(answer, streams=streams), **_errors(_POST_ERRORS)},
    }


def answering(answer: type[BaseModel], errors: dict[int, str]) -> dict[str, Any]:
    """Arguments of a route without a body."""
    return {"responses": {200: _success(answer, streams=False), **_errors(errors)}}


def answering_text(description: str) -> dict[str, Any]:
    """Arguments of a route that answers in plain text."""
    return {
        "responses": {200: {"description": description, "content": {"text/plain": {"schema": {"type": "string"}}}}},
        "response_class": Response,
    }


def describe(app: FastAPI) -> None:
    """Make the application describe itself."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _openapi(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _openapi(app: FastAPI) -> dict[str, Any]:
    found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas = found["components"]["schemas"]
    _, bodies = models_json_schema([(model, "validation") for model in _BODIES], ref_template=_REFERENCE)
    _, events = models_json_schema([(ChatChunk, "serialization")], ref_template=_REFERENCE)
    schemas.update(bodies["$defs"])
    schemas.update(events["$defs"])
    # FastAPI's own kind of error, which is never sent.
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for path in found["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    return found


def _success(answer: type[BaseModel], *, streams: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"model": answer, "description": "The answer."}
    if streams:
        found["description"] = "The answer; with stream, its pieces as events, one JSON object each, then [DONE]."
        found["content"] = {"text/event-stream": {"schema": _EVENT}}
    return found


def _errors(errors: dict[int, str]) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorResponse, "description": text} for status, text in errors.items()}
