"""Answers as server-sent events (WHATWG HTML, section 9.2): each object is one ``data:`` line.

The response starts with the first token, so that whatever goes wrong before is an ordinary HTTP error. A reader that
leaves cancels the answer, which aborts its request; a slow one holds up nobody, as the engine's chunks are merged while
they wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.errors import ShoalError
from shoal.server.disconnect import wait_for_disconnect
from shoal.server.encoding import to_json
from shoal.server.errors import ApiError, as_api_error, internal_error

DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the second: nginx passes events on at once

_log = logging.getLogger("shoal.server")


class EventStream(Response):
    """Sends ``first``, which has been waited for, and then the rest of ``events``; calls ``close`` in any case."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: list[dict[str, Any]],
        events: AsyncIterator[list[dict[str, Any]]],
        close: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or as much as the reader stays for."""
        sending = asyncio.ensure_future(self._send_all(scope, send))
        leaving = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await self._close()
            await asyncio.gather(sending, leaving, return_exceptions=True)
        if not sending.cancelled():
            sending.result()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_body(send, _encode(self._first))
        try:
            async for objects in self._events:
                await _send_body(send, _encode(objects))
        except (ShoalError, ApiError) as error:
            await _send_error(scope, send, error if isinstance(error, ApiError) else as_api_error(error))
        except Exception:
            _log.exception("an answer failed in the middle of its stream")
            await _send_error(scope, send, internal_error())
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


def _encode(objects: list[dict[str, Any]]) -> bytes:
    return b"".join([b"data: %b\n\n" % to_json(item) for item in objects])


async def _send_error(scope: Scope, send: Send, error: ApiError) -> None:
    scope.setdefault("state", {})["error_code"] = error.code or error.type  # for the log and the metrics
    await _send_body(send, _encode([error.body()]))


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
