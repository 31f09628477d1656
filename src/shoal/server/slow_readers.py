"""A reader that does not read is let go of.

An answer that finds the connection's buffer full waits until the reader has taken some. That holds up nobody else: the
engine's chunks are merged in a buffer that ``max_tokens`` bounds. But it holds the memory, and for how long is bounded
here: then the connection is cut, which the rest of the server sees as a client that left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

ABORT = "shoal.abort"  # in the scope's extensions: cuts the connection


class SlowReaders:
    """Middleware. seconds: that a part of an answer may wait for room."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        abort: Callable[[], None] | None = scope.get("extensions", {}).get(ABORT)
        if abort is None:
            await self._app(scope, receive, send)
            return

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._seconds):
                    await send(message)
            except TimeoutError:
                abort()

        await self._app(scope, receive, send_in_time)
