"""Every answer names its request: ``x-request-id``, the caller's own if it sent one that is fit for a header."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ACCEPTED = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")


class RequestIds:
    """Middleware; the id stands in ``scope["state"]["request_id"]``. Adds the milliseconds to the answer's start."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _given(scope) or f"req_{secrets.token_hex(16)}".encode()
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id.decode()
        began = self._clock()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                took = int((self._clock() - began) * 1000)
                more = [(b"x-request-id", request_id), (b"openai-processing-ms", str(took).encode())]
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        await self._app(scope, receive, send_with_id)


def _given(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ACCEPTED.fullmatch(value):
            return bytes(value)
    return None
