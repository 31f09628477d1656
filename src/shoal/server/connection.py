"""One connection of a client, with bounds on what uvicorn leaves open.

How many there may be, how long the head of a request may take and how large it may be, how much a message may be in
all, and that a connection which is to be closed does not wait for a reader who does not read.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shoal.server.encoding import to_json
from shoal.server.errors import RETRY_SECONDS, SERVER, ApiError
from shoal.server.slow_readers import ABORT

MAX_HEAD_BYTES = 64 * 1024
_AT_ONCE = struct.pack("ii", 1, 0)  # of lingering: on, for no time
_CHUNKED = 8  # a chunked body may be so many times as long on the wire


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """connections: at once. head_seconds: for a request's line and headers. body_bytes: of a request's body.
    write_seconds: for the end of an answer to be read.
    """

    connections: int
    head_seconds: float
    body_bytes: int
    write_seconds: float


class Connection(HttpToolsProtocol):
    """See the module. A call that cuts it stands in each request's ``scope["extensions"]``."""

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._message_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._refuse(
                ApiError(503, "too many connections; retry later", type=SERVER, code="too_many_connections"),
                b"503 Service Unavailable",
            )
        else:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        """Some bytes of a request, or of several."""
        if self.transport.is_closing():
            return
        self._message_bytes += len(data)
        if self._head_timer is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > MAX_HEAD_BYTES:
            message = f"the request's line and headers have more than {MAX_HEAD_BYTES} bytes"
            self._refuse(ApiError(431, message, code="headers_too_large"), b"431 Request Header Fields Too Large")
        elif self._message_bytes > MAX_HEAD_BYTES + _CHUNKED * self._limits.body_bytes:
            self._cut()  # chunks or trailers without an end; the application does not see them

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: self._cut}  # type: ignore[dict-item]
        self._message_bytes = 0
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        """Its head is there."""
        self._forget_head()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """An answer was handed over."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._cut_later()

    def timeout_keep_alive_handler(self) -> None:
        """The connection was idle for long enough."""
        if self.transport.get_write_buffer_size():
            self._cut()  # closing would wait for a reader who had all this time
        else:
            super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._forget_head()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(self._limits.head_seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_head()  # it comes behind an answer that is on its way, and nobody reads on until that is done
        else:
            self._cut()

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _cut(self) -> None:
        # Otherwise the system would go on offering what was written, for as long as the reader lives.
        bound = self.transport.get_extra_info("socket")
        if bound is not None and not self.transport.is_closing():
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.transport.abort()

    def _refuse(self, error: ApiError, status: bytes) -> None:
        self._forget_head()
        body = to_json(error.body())
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"retry-after: %d\r\nconnection: close\r\n\r\n%b" % (status, len(body), RETRY_SECONDS, body)
        )
        self.transport.close()
        self._cut_later()

    def _cut_later(self) -> None:
        """Closing waits until what was written is read; that, too, has an end."""
        self.loop.call_later(self._limits.write_seconds, self._cut)
