"""Reading a request's body: JSON only, and only so much of it."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from shoal.server.disconnect import ClientGoneError
from shoal.server.errors import ApiError

# What was not read is in the way of the connection's next request.
_CLOSE = {"connection": "close"}


async def read_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """The body. ``ApiError`` 415 for another content type, 413 for more bytes than allowed, 408 for a slow sender.

    The type is insisted on because a web page can make a browser send any other to this server without asking first.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        got = f"got {kind[:100]!r}" if kind else "there is none"
        message = f"the body must be JSON: send the header 'Content-Type: application/json' ({got})"
        raise ApiError(415, message, code="unsupported_media_type")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                parts.append(part)
    except ClientDisconnect:
        raise ClientGoneError from None
    except TimeoutError:
        message = f"the body was not there within {seconds:g} s, which is the server's limit (--body-timeout)"
        raise ApiError(408, message, code="body_timeout", headers=_CLOSE) from None
    return b"".join(parts)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body has more than {max_bytes} bytes, which is the server's limit (--max-body-bytes)",
        code="body_too_large",
        headers=_CLOSE,
    )
