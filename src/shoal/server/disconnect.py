"""Noticing that a client has gone away, while it waits for its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

_Result = TypeVar("_Result")


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has left. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def while_connected(receive: Receive, work: Awaitable[_Result]) -> _Result:
    """The result of ``work``; if the client leaves first, it is cancelled and ``ClientGoneError`` raised."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
