"""Clients that leave, requests that fail, engines that stop: only those concerned notice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from typing import Any

import httpx
import pytest
from server_support import CHAT, COMPLETIONS, HELLO, Client, events, run, serving

from shoal.backends.null import Fault
from shoal.config import ServerConfig
from shoal.server.app import make_app
from shoal.server.service import Service

# The null backend's requests are numbered in the order in which they are prepared.
FIRST, SECOND = "request-1", "request-2"
BODY = {"prompt": "abc", "max_tokens": 8}


def test_a_request_that_fails_at_its_first_token_is_an_ordinary_error() -> None:
    async def play(client: Client) -> None:
        for stream in (False, True):
            error = await client.refused(COMPLETIONS, {**BODY, "stream": stream}, 500)
            assert (error["type"], error["code"]) == ("server_error", "request_failed")
            assert "scripted fault" in error["message"]
        assert (await client.whole(COMPLETIONS, BODY))["choices"]

    faults = tuple(Fault(request_id=name, kind="error") for name in (FIRST, SECOND))
    run(play, faults=faults)


def test_a_request_that_fails_later_ends_its_stream_with_the_error() -> None:
    gate = threading.Event()

    async def play(client: Client) -> None:
        neighbour = asyncio.ensure_future(client.whole(CHAT, {**HELLO, "max_tokens": 400}))
        while not client.served.client._streams:
            await asyncio.sleep(0)
        connection = Connection(client, COMPLETIONS, {"prompt": "abc", "max_tokens": 400, "stream": True})
        task = connection.start()
        while not connection.received.is_set():
            gate.set()  # for a step or two
            await asyncio.sleep(0)
        client.served.engine._engine._backend.on_step = None  # type: ignore[attr-defined]
        gate.set()
        await task
        assert connection.status == 200
        *texts, error = [json.loads(line) for line in events(connection.data.decode())]
        assert error["error"]["code"] == "request_failed"
        assert 1 <= sum(len(item["choices"][0]["text"]) for item in texts) <= 300
        assert (await neighbour)["usage"]["completion_tokens"] == 400

    fault = Fault(request_id=SECOND, kind="raise", after=300)
    run(play, faults=(fault,), gate=gate, on_step=lambda step: gate.clear())


def test_a_request_that_fails_later_is_an_error_when_it_is_not_streamed() -> None:
    async def play(client: Client) -> None:
        error = await client.refused(COMPLETIONS, {**BODY, "prompt": ["abc", "def"]}, 500)
        assert error["code"] == "request_failed"

    run(play, faults=(Fault(request_id=SECOND, kind="error", after=3),))


def test_an_engine_that_stops_fails_health_and_everybody() -> None:
    async def main() -> None:
        async with serving() as client:
            client.served.engine._engine._scheduler.commit = _broken  # type: ignore[method-assign]
            for stream in (False, True):
                error = await client.refused(COMPLETIONS, {**BODY, "stream": stream}, 503)
                assert error["code"] == "engine_unavailable"
            assert (await client.http.get("/health")).status_code == 503
            assert (await client.http.get("/ready")).status_code == 503

    def _broken(*_: Any) -> Any:
        raise RuntimeError("the books are wrong")

    asyncio.run(main())


class Connection:
    """One request by hand, over ASGI, by a client that can leave."""

    def __init__(self, client: Client, path: str, body: dict[str, Any]) -> None:
        self._app = client.http._transport.app  # type: ignore[attr-defined]
        self._body = json.dumps(body).encode()
        self._path = path
        self._left = asyncio.Event()
        self.received = asyncio.Event()
        self.status: int | None = None
        self.data = b""

    def start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._run())

    def leave(self) -> None:
        self._left.set()

    async def _run(self) -> None:
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": self._body, "more_body": False}
            await self._left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
            else:
                self.data += message.get("body", b"")
                self.received.set()

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
            "client": ("test", 1),
            "server": ("test", 80),
        }
        await self._app(scope, receive, send)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(stream: bool) -> None:
    gate = threading.Event()

    async def main() -> None:
        async with serving(gate=gate, blocks=64, context_length=1000) as client:
            gone = Connection(client, COMPLETIONS, {"prompt": "a", "max_tokens": 900, "stream": stream, "n": 2})
            task = gone.start()
            if stream:
                gate.set()
                await gone.received.wait()
                gate.clear()
            else:
                while not client.served.client._streams:
                    await asyncio.sleep(0)
            gone.leave()
            await task
            assert client.served.client._streams == {}
            gate.set()
            # Freed: a request that needs nearly all blocks runs at once.
            answer = await client.whole(COMPLETIONS, {"prompt": "b", "max_tokens": 990})
            assert answer["usage"]["completion_tokens"] == 990
            assert client.served.engine.stats.generated_tokens < 990 + 1800

    asyncio.run(main())


def test_a_client_that_leaves_while_its_body_comes() -> None:
    async def main() -> None:
        async with serving() as client:
            connection = Connection(client, COMPLETIONS, BODY)

            async def receive() -> dict[str, Any]:
                return {"type": "http.disconnect"}

            async def send(message: dict[str, Any]) -> None:
                return None

            app = connection._app
            scope = {
                "type": "http",
                "method": "POST",
                "path": COMPLETIONS,
                "headers": [(b"content-type", b"application/json")],
            }
            await app({**scope, "query_string": b"", "root_path": "", "scheme": "http"}, receive, send)
            assert client.served.engine.stats.steps == 0

    asyncio.run(main())


def test_a_bug_is_a_500_that_tells_nothing_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def play(client: Client) -> None:
        def secret(*_: Any, **__: Any) -> Any:
            raise KeyError("secret of the inside")

        client.served.client.queue = secret  # type: ignore[method-assign]
        for path, body in ((CHAT, HELLO), (COMPLETIONS, BODY)):
            error = await client.refused(path, body, 500)
            assert error["code"] == "internal_error"
            assert "secret" not in error["message"]

    run(play)


def test_a_bug_in_the_middle_of_a_stream(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    gate.set()

    async def play(client: Client) -> None:
        connection = Connection(client, CHAT, {**HELLO, "max_tokens": 50, "stream": True, "logprobs": True})
        original = client.served.texts.text

        def fails_later(token_id: int) -> str:
            if connection.received.is_set():
                raise KeyError("secret of the inside")
            return original(token_id)

        client.served.texts.text = fails_later  # type: ignore[method-assign]
        task = connection.start()
        await connection.received.wait()
        gate.set()
        await task
        payloads = [json.loads(line) for line in events(connection.data.decode())]
        assert payloads[-1]["error"]["code"] == "internal_error"
        assert "secret" not in connection.data.decode()

    # Only the first step passes the gate until the first event was sent.
    run(play, gate=gate, on_step=lambda step: gate.clear() if step == 1 else None)
    assert "secret of the inside" in caplog.text


def test_before_the_model_is_there_and_when_the_server_closes() -> None:
    async def main() -> None:
        async with serving() as client:
            service = Service(version="0", clock=lambda: 0.0)
            app = make_app(service, ServerConfig(), logger=logging.getLogger("shoal.requests"))
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
                starting = Client(http, client.served, service)

                async def statuses() -> list[int]:
                    found = [(await http.get(path)).status_code for path in ("/health", "/ready", "/v1/models")]
                    return [*found, (await starting.post(CHAT, {**HELLO, "max_tokens": 1})).status_code]

                assert await statuses() == [200, 503, 503, 503]
                service.open(client.served)
                assert await statuses() == [200, 200, 200, 200]
                running = asyncio.ensure_future(starting.whole(CHAT, {**HELLO, "max_tokens": 400}))
                while not client.served.client._streams:
                    await asyncio.sleep(0)
                service.stop_admitting()
                assert await statuses() == [200, 503, 503, 503]
                refused = await starting.post(CHAT, HELLO)
                assert refused.headers["retry-after"] == "1"
                assert "shutting down" in refused.json()["error"]["message"]
                assert (await running)["usage"]["completion_tokens"] == 400

    asyncio.run(main())


def test_requests_that_run_when_the_engine_closes_are_errors() -> None:
    gate = threading.Event()

    async def main() -> None:
        async with serving(gate=gate) as client:
            whole = asyncio.ensure_future(client.post(COMPLETIONS, BODY))
            while not client.served.client._streams:
                await asyncio.sleep(0)
            closing = asyncio.ensure_future(asyncio.to_thread(client.served.engine.close))
            gate.set()
            await closing
            answer = await whole
            if answer.status_code != 200:  # the close may come after the last step
                assert answer.status_code == 503
                assert "shutting down" in answer.json()["error"]["message"]
            assert (await client.post(COMPLETIONS, BODY)).status_code == 503

    asyncio.run(main())
    assert not [thread for thread in threading.enumerate() if thread.name == "shoal-engine"]


def test_what_the_log_says(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shoal.requests")

    async def play(client: Client) -> None:
        body = {**BODY, "prompt": "a secret prompt", "user": "u1", "metadata": {"job": "7"}}
        answer = await client.post(COMPLETIONS, body, **{"x-request-id": "abc-1"})
        assert answer.headers["x-request-id"] == "abc-1"
        odd = await client.post(COMPLETIONS, {"prompt": 5}, **{"x-request-id": "a b\t"})
        assert odd.headers["x-request-id"].startswith("req_")
        await client.post(CHAT, {**HELLO, "stream": True, "max_tokens": 4})

    run(play)
    first, second, third = (record.fields for record in caplog.records if record.name == "shoal.requests")
    assert {name: first[name] for name in ("request_id", "status", "path", "complete", "user", "metadata")} == {
        "request_id": "abc-1",
        "status": 200,
        "path": COMPLETIONS,
        "complete": True,
        "user": "u1",
        "metadata": {"job": "7"},
    }
    assert (first["prompt_tokens"], first["completion_tokens"], first["cached_tokens"]) == (15, 8, 0)
    assert second["status"] == 400
    assert "user" not in second
    assert (third["completion_tokens"], third["complete"]) == (4, True)
    assert "secret" not in caplog.text


def test_a_stream_broken_off_is_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shoal.requests")

    async def play(client: Client) -> None:
        gone = Connection(client, CHAT, {**HELLO, "stream": True})
        task = gone.start()
        await gone.received.wait()
        gone.leave()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    run(play, context_length=3000, blocks=256)
    line = caplog.records[-1].fields
    assert line["complete"] is False or line["completion_tokens"] == line["prompt_tokens"]
