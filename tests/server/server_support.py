"""A server in process on the null backend, and its answers held against its own description."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import httpx
from engine_support import make_loaded
from pydantic import BaseModel
from starlette.types import ASGIApp

from shoal.config import ServerConfig
from shoal.engine.start import start_engine
from shoal.server.access.api_key import ApiKey
from shoal.server.app import make_app
from shoal.server.responses import ChatChunk, ChatResponse, CompletionResponse, ErrorResponse
from shoal.server.service import ServedModel, Service

NAME = "fake"
NOW = 1_700_000_000
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}


class Client:
    """Requests to one server. Every answer is checked for what all answers must be."""

    def __init__(self, http: httpx.AsyncClient, served: ServedModel, service: Service) -> None:
        self.http = http
        self.served = served
        self.service = service

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """``body``: bytes as they are, anything else as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await self.http.post(path, content=content, headers={"content-type": "application/json", **headers})
        assert answer.headers["x-request-id"]
        answer.content.decode("utf-8")
        return answer

    async def whole(self, path: str, body: Any) -> dict[str, Any]:
        """A successful answer."""
        answer = await self.post(path, body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/json"
        return _checked(answer.text, ChatResponse if path == CHAT else CompletionResponse)

    async def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The objects of a successful stream."""
        answer = await self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return [_checked(line, ChatChunk if path == CHAT else CompletionResponse) for line in events(answer.text)]

    async def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error object of an answer that refuses."""
        answer = await self.post(path, body)
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/json"
        error: dict[str, Any] = _checked(answer.text, ErrorResponse)["error"]
        return error


def events(text: str) -> list[str]:
    """The payloads of an event stream, which must end as OpenAI's do."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    assert all(block.startswith("data: ") and len(block.splitlines()) == 1 for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def strict_json(text: str) -> Any:
    """A value without NaN or infinities."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in an answer")

    return json.loads(text, parse_constant=refuse)


def _checked(text: str, shape: type[BaseModel]) -> dict[str, Any]:
    value: dict[str, Any] = strict_json(text)
    shape.model_validate(value, strict=True)
    return value


@contextlib.asynccontextmanager
async def serving(
    *,
    server: ServerConfig = ServerConfig(max_body_bytes=1 << 20),  # noqa: B008  # frozen
    keys: Iterable[ApiKey] = (),
    clock: Callable[[], float] = time.monotonic,
    traced: Callable[[ASGIApp], ASGIApp] | None = None,
    **options: Any,
) -> AsyncIterator[Client]:
    """A server over ``make_loaded(**options)``; at its end every block must be free."""
    loaded = make_loaded(**options)
    engine = start_engine(loaded)
    service = Service(version="0.0.0", clock=lambda: float(NOW))
    served = ServedModel.of(loaded, engine, name=NAME, created=NOW, version="0.0.0")
    service.open(served)
    app = make_app(service, server, keys=keys, clock=clock, traced=traced, logger=logging.getLogger("shoal.requests"))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
            yield Client(http, served, service)
        if engine.alive:
            stats = engine.stats.scheduler
            while stats.running or stats.waiting:  # aborted requests leave at the next step
                await asyncio.sleep(0.001)
                stats = engine.stats.scheduler
            assert stats.used_blocks == 0
    finally:
        engine.close()


def run(play: Callable[[Client], Awaitable[None]], **options: Any) -> None:
    """Play against a server of its own."""

    async def main() -> None:
        async with serving(**options) as client:
            await play(client)

    asyncio.run(main())


def joined_completion(objects: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices that a completion stream amounts to, by index."""
    choices: dict[int, dict[str, Any]] = {}
    for item in objects:
        for piece in item["choices"]:
            whole = choices.setdefault(piece["index"], {"index": piece["index"], "text": "", "logprobs": None})
            whole["text"] += piece["text"]
            whole["finish_reason"] = piece["finish_reason"]
            if piece["logprobs"] is not None:
                whole["logprobs"] = whole["logprobs"] or {name: [] for name in piece["logprobs"]}
                for name, values in piece["logprobs"].items():
                    whole["logprobs"][name] += values
    return choices


def joined_chat(objects: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The same for a chat stream; calls without their random ids."""
    choices: dict[int, dict[str, Any]] = {}
    for item in objects:
        for piece in item["choices"]:
            whole = choices.setdefault(
                piece["index"], {"index": piece["index"], "content": "", "calls": [], "logprobs": None}
            )
            delta = piece["delta"]
            if "role" in delta:
                assert whole["content"] == ""
                whole["role"] = delta["role"]
            whole["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(whole["calls"])
                    whole["calls"].append([call["function"]["name"], ""])
                whole["calls"][call["index"]][1] += call["function"]["arguments"]
            whole["finish_reason"] = piece["finish_reason"]
            if piece["logprobs"] is not None:
                whole["logprobs"] = (whole["logprobs"] or []) + piece["logprobs"]["content"]
    return choices


def plain_chat(answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """A whole chat answer in the shape of ``joined_chat``."""
    return {
        choice["index"]: {
            "index": choice["index"],
            "role": choice["message"]["role"],
            "content": choice["message"]["content"] or "",
            "calls": [
                [call["function"]["name"], call["function"]["arguments"]]
                for call in choice["message"].get("tool_calls", ())
            ],
            "logprobs": None if choice["logprobs"] is None else choice["logprobs"]["content"],
            "finish_reason": choice["finish_reason"],
        }
        for choice in answer["choices"]
    }
