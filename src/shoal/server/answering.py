"""How a generating request is answered, from its first byte to its last event."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request
from starlette.responses import Response

from shoal.config import ServerConfig
from shoal.server.access.caller import Caller, Lease
from shoal.server.answers.answer import Answer
from shoal.server.disconnect import while_connected
from shoal.server.incoming import read_request
from shoal.server.overload import Overload
from shoal.server.prepare import is_light
from shoal.server.reply import json_reply
from shoal.server.request_log import Generated
from shoal.server.requests import ChatRequest, CompletionRequest, Generation
from shoal.server.service import ServedModel, Service
from shoal.server.sse import EventStream
from shoal.server.time_limit import TimeLimit
from shoal.server.work import Work
from shoal.server.workers import Workers

_Body = TypeVar("_Body", CompletionRequest, ChatRequest)


class Answering:
    """What the generating endpoints have in common."""

    def __init__(self, service: Service, config: ServerConfig, workers: Workers) -> None:
        self._service = service
        self._config = config
        self._workers = workers
        self._overload = Overload(config.max_wait)

    async def answer(
        self, request: Request, model: type[_Body], prepare: Callable[[ServedModel, _Body, Caller], Work]
    ) -> Response:
        """Read, prepare, queue and answer; errors are raised."""
        lease: Lease = request.state.lease
        lease.begin()
        served, body, size = await read_request(request, self._service, model, self._config)
        if is_light(body, size):
            work = prepare(served, body, lease.caller)
        else:
            work = await self._workers.prepare(prepare, served, body, lease.caller)
        return await self._answer(request, body, work)

    async def _answer(self, request: Request, body: Generation, work: Work) -> Response:
        stream = self._overload.queue(work.served, work.requests)
        request.state.lease.use(stream)
        keep, created = self._config.log_prompts, int(self._service.clock())
        answer = Answer(work, stream, id=secrets.token_hex(12), created=created, keep_texts=keep)
        request.state.generated = Generated(
            tally=answer.tally, body=body, model=work.served.name, id=answer.id, texts=answer.texts
        )
        limit = TimeLimit(self._config.request_timeout)
        try:
            if not work.stream:
                return json_reply(await while_connected(request.receive, limit.hold(answer.whole())))
            events = limit.hold_each(answer.events())
            first = await while_connected(request.receive, anext(events))
        except BaseException:
            await stream.aclose()
            raise
        return EventStream(first, events, stream.aclose)
