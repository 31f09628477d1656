"""A limit on the time of one answer, whole or in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

from shoal.server.errors import SERVER, ApiError

_Result = TypeVar("_Result")


class TimeLimit:
    """Begins when it is made, in the event loop. ``ApiError`` 504 when it is over; what was held is cancelled."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = asyncio.get_running_loop().time() + seconds

    async def hold(self, work: Awaitable[_Result]) -> _Result:
        """The result, if it comes in time."""
        try:
            async with asyncio.timeout_at(self._end):
                return await work
        except TimeoutError:
            message = f"not done within {self._seconds:g} s, which is the server's limit (--request-timeout)"
            raise ApiError(504, message, type=SERVER, code="request_timeout") from None

    async def hold_each(self, items: AsyncIterator[_Result]) -> AsyncIterator[_Result]:
        """The items, as long as they come in time."""
        while True:
            try:
                item = await self.hold(anext(items))
            except StopAsyncIteration:
                return
            yield item
