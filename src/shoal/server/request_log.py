"""Every request has an id and leaves one line in the log.

The id is the caller's own ``x-request-id`` if that is fit for a header, and goes back in the answer. The line is a JSON
object, written when the answer has been sent: what was asked of which path, how it went, and for generated answers the
tokens, the times, and the caller's ``user`` and ``metadata``. Prompts and answers are not in it, unless the operator
asked for them.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.server.access.caller import Lease
from shoal.server.answers.usage import Tally
from shoal.server.json_log import FIELDS
from shoal.server.metrics import Metrics
from shoal.server.requests import ChatRequest, Generation

_ACCEPTED = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
_MAX_PATH = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A generating request that was begun; a handler puts it into ``scope["state"]["generated"]``.

    model, id: as the answer names them. texts: of the completions so far, if prompts and answers are to be logged.
    """

    tally: Tally
    body: Generation
    model: str
    id: str
    texts: Mapping[tuple[str, int], list[str]] | None = None

    def facts(self) -> dict[str, Any]:
        """What it adds to its line."""
        usage, timings = self.tally.usage(), self.tally.timings()
        found: dict[str, Any] = {
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "cached_tokens": self.tally.cached_tokens,
            "ttft_s": timings["ttft_s"],
            "queue_s": timings["queue_s"],
        }
        if self.body.user is not None:
            found["user"] = self.body.user
        if self.body.metadata is not None:
            found["metadata"] = self.body.metadata
        if self.texts is not None:
            found["prompt"] = getattr(self.body, "messages" if isinstance(self.body, ChatRequest) else "prompt")
            found["answers"] = ["".join(self.texts[name]) for name in sorted(self.texts)]
        return found


class RequestLog:
    """Middleware around everything. clock: seconds."""

    def __init__(
        self, app: ASGIApp, logger: logging.Logger, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._logger = logger
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _given(scope) or f"req_{secrets.token_hex(16)}".encode()
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id.decode()
        began = self._clock()
        status: int | None = None
        complete = False

        async def send_with_id(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                took = int((self._clock() - began) * 1000)
                more = [(b"x-request-id", request_id), (b"openai-processing-ms", str(took).encode())]
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                complete = True

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            generated: Generated | None = state.get("generated")
            lease: Lease | None = state.get("lease")
            key = None if lease is None else lease.caller.name
            code: str | None = state.get("error_code")
            self._metrics.observe(scope["path"], status, complete=complete)
            if code is not None:
                self._metrics.observe_error(code)
            if generated is not None:
                self._metrics.observe_times(generated.tally.timelines)
                if key is not None:
                    usage = generated.tally
                    self._metrics.observe_key(key, usage.prompt_tokens, usage.completion_tokens)
            if self._logger.isEnabledFor(logging.INFO):
                line: dict[str, Any] = {
                    "request_id": state["request_id"],
                    "method": scope["method"],
                    "path": scope["path"][:_MAX_PATH],
                    "status": status,
                    "complete": complete,  # false: the client left, or the answer broke off
                    "seconds": round(self._clock() - began, 6),
                }
                line |= {name: value for name, value in (("key", key), ("error", code)) if value is not None}
                if generated is not None:
                    line |= generated.facts()
                self._logger.info("request", extra={FIELDS: line})


def _given(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ACCEPTED.fullmatch(value):
            return bytes(value)
    return None
