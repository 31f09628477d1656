"""Answers as JSON, from inside and from outside the application."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Send

from shoal.server.encoding import to_json
from shoal.server.errors import ApiError


def json_reply(value: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer for a handler to return."""
    return Response(to_json(value), status_code=status, headers=headers, media_type="application/json")


def error_reply(error: ApiError) -> Response:
    """The same for an error."""
    return json_reply(error.body(), error.status, error.headers)


async def send_error(error: ApiError, send: Send) -> None:
    """An answer by itself, for what stands before the application."""
    body = to_json(error.body())
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})
