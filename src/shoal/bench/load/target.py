"""A server's address, and one streamed request to it over a connection that is kept for the next.

Written on asyncio's transports and httptools' parser rather than a general HTTP client: the generator runs on the same
cores as the server that it measures, and must not be what is measured. An event's time is the time at which its bytes
arrived.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from shoal.errors import ConfigError

DONE = b"[DONE]"


@dataclass(slots=True)
class Outcome:
    """One request, as its client saw it; times are the event loop's.

    planned: when it was to be sent. events: when each piece of text arrived. tokens: from the usage, or the events'
    number when the server tells no usage. error: what went wrong, in a word or two; None if all went well.
    """

    planned: float
    sent: float = 0.0
    ended: float = 0.0
    status: int = 0
    events: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


class Target:
    """Sends requests to ``base_url`` (such as ``http://127.0.0.1:8000/v1``). ``api_key`` goes with each of them."""

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError("url", f"must look like http://127.0.0.1:8000/v1, got {base_url!r}")
        try:
            port = parts.port
        except ValueError:
            raise ConfigError("url", f"{base_url!r} has no valid port") from None
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        self._folder = parts.path.rstrip("/")
        self._authority = parts.netloc.rpartition("@")[2]
        self._key = api_key
        self._idle: list[_Connection] = []

    async def send(self, path: str, body: Mapping[str, Any], outcome: Outcome, time_limit: float) -> None:
        """Send one request and fill its outcome; never raises for what the server or the network does."""
        loop = asyncio.get_running_loop()
        outcome.sent = loop.time()
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(time_limit):
                connection = await self._connect()
                connection.begin(self._request(path, body), outcome)
                await connection.ended()
            if connection.reusable:
                self._idle.append(connection)
                connection = None
        except TimeoutError:
            outcome.error = "timed out"
        except OSError as error:
            outcome.error = f"connection: {error.strerror or type(error).__name__}"
        finally:
            outcome.ended = loop.time()
            if connection is not None:
                connection.close()

    def close(self) -> None:
        """Close the connections that are kept."""
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        _, connection = await asyncio.get_running_loop().create_connection(
            _Connection, self._host, self._port, ssl=self._tls
        )
        return connection

    def _request(self, path: str, body: Mapping[str, Any]) -> bytes:
        data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        head = [
            f"POST {self._folder}{path} HTTP/1.1",
            f"Host: {self._authority}",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
        ]
        if self._key is not None:
            head.append(f"Authorization: Bearer {self._key}")
        return "\r\n".join([*head, "", ""]).encode() + data


class _Connection(asyncio.Protocol):
    """One connection; the callbacks below ``begin`` are asyncio's and httptools'."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._outcome: Outcome | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._data = b""
        self._at = 0.0
        self._complete = False
        self._finished = False  # the stream said so
        self.reusable = False

    def begin(self, request: bytes, outcome: Outcome) -> None:
        self._outcome = outcome
        self._done = self._loop.create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._data, self._complete, self._finished, self.reusable = b"", False, False, False
        assert self._transport is not None  # connected before it is handed out
        self._transport.write(request)

    async def ended(self) -> None:
        assert self._done is not None  # after begin
        await self._done

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without being derived from it

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._outcome is not None and not self._complete:
            self._outcome.error = self._outcome.error or "connection: closed before the answer's end"
            self._end()

    def data_received(self, data: bytes) -> None:
        self._at = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if self._outcome is not None:
                self._outcome.error = "the answer is not HTTP"
            self.close()
            self._end()

    def on_headers_complete(self) -> None:
        if self._outcome is not None:
            self._outcome.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._data += data
        if self._outcome is None or self._outcome.status != 200:
            return
        while (end := self._data.find(b"\n")) >= 0:
            line, self._data = self._data[:end].rstrip(b"\r"), self._data[end + 1 :]
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def on_message_complete(self) -> None:
        self._complete = True
        outcome = self._outcome
        if outcome is None:
            return
        if outcome.status != 200:
            outcome.error = f"{outcome.status} {_code(self._data)}".rstrip()
        elif outcome.error is None and not self._finished:
            outcome.error = "the stream has no end"
        if not outcome.tokens:
            outcome.tokens = len(outcome.events)
        self.reusable = self._parser.should_keep_alive()
        self._end()

    def _event(self, payload: bytes) -> None:
        assert self._outcome is not None  # looked at by the caller
        if payload == DONE:
            self._finished = True
            return
        try:
            found = json.loads(payload)
        except ValueError:
            self._outcome.error = "an event is not JSON"
            return
        if "error" in found:
            self._outcome.error = f"stream {_code(payload)}".rstrip()
            return
        if any(_has_text(choice) for choice in found.get("choices") or ()):
            self._outcome.events.append(self._at)
        usage = found.get("usage")
        if isinstance(usage, dict):
            self._outcome.tokens = int(usage.get("completion_tokens") or 0)
            self._outcome.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            details = usage.get("prompt_tokens_details") or {}
            self._outcome.cached_tokens = int(details.get("cached_tokens") or 0)

    def _end(self) -> None:
        self._outcome = None
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("tool_calls") or delta.get("reasoning_content"))


def _code(body: bytes) -> str:
    """The error's code or type, if the body is OpenAI's error object."""
    try:
        error = json.loads(body)["error"]
        return str(error.get("code") or error.get("type") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""
