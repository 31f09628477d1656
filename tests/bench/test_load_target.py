"""The load generator against servers that behave and servers that do not."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from shoal.bench.load.report import make_report
from shoal.bench.load.run import run_closed, run_open
from shoal.bench.load.sweep import Load, measure_sweep
from shoal.bench.load.target import Outcome, Target
from shoal.errors import ConfigError

Handler = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 7, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 2}},
}


@contextlib.asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """A server whose every answer the handler writes by hand."""

    tasks: set[asyncio.Task[None]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(line.split(": ", 1) for line in head.splitlines()[1:] if line)
                body = json.loads(await reader.readexactly(int(fields["Content-Length"])))
                await handler({**body, "_head": head}, writer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_server(
        lambda reader, writer: tasks.add(asyncio.create_task(talk(reader, writer))), "127.0.0.1", 0
    )
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def text(piece: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": piece}}]})


def send_one(handler: Handler, time_limit: float = 20.0, body: dict[str, Any] | None = None) -> Outcome:
    async def play() -> Outcome:
        async with serving(handler) as url:
            target, outcome = Target(url), Outcome(0.0)
            await target.send("/chat/completions", body or {}, outcome, time_limit)
            target.close()
            return outcome

    return asyncio.run(play())


async def well(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    whole = (
        role + text("a") + text("b") + event({"choices": [{"index": 0, "delta": {}}]}) + event(USAGE) + event(b"[DONE]")
    )
    writer.write(HEAD + chunk(whole) + b"0\r\n\r\n")


def test_a_stream_is_counted_by_its_usage() -> None:
    outcome = send_one(well)
    assert (outcome.error, outcome.status) == (None, 200)
    assert (outcome.tokens, outcome.prompt_tokens, outcome.cached_tokens) == (9, 7, 2)
    assert len(outcome.events) == 2


def test_without_a_usage_events_are_counted_and_bytes_may_come_one_by_one() -> None:
    async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for byte in text("é") + text("b").replace(b"\n", b"\r\n") + event(b"[DONE]"):
            writer.write(chunk(bytes([byte])))
        writer.write(b"0\r\n\r\n")

    outcome = send_one(handler)
    assert (outcome.error, outcome.tokens, len(outcome.events)) == (None, 2, 2)


def test_what_is_sent() -> None:
    seen: dict[str, Any] = {}

    async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        seen.update(body)
        await well(body, writer)

    async def play() -> None:
        async with serving(handler) as url:
            target = Target(url, api_key="secret")
            await target.send("/completions", {"prompt": "é"}, Outcome(0.0), 20)
            target.close()

    asyncio.run(play())
    assert seen["_head"].startswith("POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:")
    assert "Authorization: Bearer secret\r\n" in seen["_head"]
    assert {name: seen[name] for name in ("prompt", "stream", "stream_options")} == {
        "prompt": "é",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def answers(data: bytes, *, close: bool = False) -> Handler:
    async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        if close:
            await writer.drain()
            writer.close()

    return handler


ERROR = json.dumps({"error": {"message": "m", "type": "t", "param": None, "code": "queue_full"}}).encode()


@pytest.mark.parametrize(
    ("handler", "error"),
    [
        (answers(b"HTTP/1.1 429 Too Many\r\nContent-Length: %d\r\n\r\n%b" % (len(ERROR), ERROR)), "429 queue_full"),
        (answers(b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\nooop"), "500"),
        (
            answers(HEAD + chunk(text("a") + event({"error": {"code": "request_failed"}})) + b"0\r\n\r\n"),
            "stream request_failed",
        ),
        (answers(HEAD + chunk(text("a")) + b"0\r\n\r\n"), "the stream has no end"),
        (answers(HEAD + chunk(event(b"{oops")) + b"0\r\n\r\n"), "an event is not JSON"),
        (answers(HEAD + chunk(text("a")), close=True), "connection: closed before the answer's end"),
        (answers(b"", close=True), "connection: closed before the answer's end"),
        (answers(b"SSH-2.0-OpenSSH\r\n\r\n"), "the answer is not HTTP"),
    ],
)
def test_what_can_go_wrong(handler: Handler, error: str) -> None:
    assert send_one(handler).error == error


def test_a_server_that_does_not_answer_is_given_up() -> None:
    async def silent(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(text("a")))

    outcome = send_one(silent, time_limit=0.2)
    assert outcome.error == "timed out"
    assert len(outcome.events) == 1


def test_nobody_there() -> None:
    async def play() -> Outcome:
        outcome = Outcome(0.0)
        await Target("http://127.0.0.1:9/v1").send("/completions", {}, outcome, 20)
        return outcome

    error = asyncio.run(play()).error
    assert error is not None
    assert error.startswith("connection: ")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a/v1", "http://", "http://a:99999/v1", "http://a/v1?x=1"])
def test_wrong_addresses(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        Target(url)


def test_connections_are_used_again() -> None:
    peers = []

    async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        peers.append(writer.get_extra_info("peername"))
        await well(body, writer)

    async def play() -> None:
        async with serving(handler) as url:
            run = await run_closed(target := Target(url), "/completions", [{}] * 12, 3, time_limit=20)
            target.close()
            assert [outcome.error for outcome in run.outcomes] == [None] * 12

    asyncio.run(play())
    assert len(set(peers)) <= 3


def test_a_slow_server_does_not_slow_the_arrivals() -> None:
    """Nobody is answered before everybody has asked."""
    asked = asyncio.Event
    count = 40

    async def play() -> None:
        everybody = asked()
        waiting = 0

        async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            nonlocal waiting
            waiting += 1
            if waiting == count:
                everybody.set()
            await everybody.wait()
            await well(body, writer)

        async with serving(handler) as url:
            arrivals = [0.001 * number for number in range(count)]
            run = await run_open(target := Target(url), "/completions", [{}] * count, arrivals, time_limit=60)
            target.close()
        assert [outcome.error for outcome in run.outcomes] == [None] * count
        assert [outcome.planned - run.began for outcome in run.outcomes] == pytest.approx(arrivals)
        report = make_report(run, asked_rate=1000.0)
        assert report.succeeded == count

    asyncio.run(play())


def test_a_closed_loop_never_has_more_at_once() -> None:
    now = most = 0

    async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        await well(body, writer)

    async def play() -> None:
        async with serving(handler) as url:
            run = await run_closed(target := Target(url), "/completions", [{}] * 30, 4, time_limit=20)
            target.close()
            assert len(run.outcomes) == 30

    asyncio.run(play())
    assert 1 <= most <= 4


def test_a_sweep_sends_nothing_twice() -> None:
    prompts: list[int] = []

    async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        prompts.append(body["prompt"])
        await well(body, writer)

    async def play() -> None:
        loads = [Load(label="a", count=3, at_once=2), Load(label="b", count=4, arrivals=(0.0, 0.0, 0.001, 0.002))]
        told = []
        async with serving(handler) as url:
            reports = await measure_sweep(
                Target(url),
                "/completions",
                loads,
                lambda count: [{"prompt": number} for number in range(count)],
                time_limit=20,
                warm_up=2,
                limits=None,
                notice=lambda load, done: told.append((load.label, done)),
            )
        assert [report.succeeded for report in reports] == [3, 4]
        assert told == [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 2), ("b", 3), ("b", 4)]

    asyncio.run(play())
    assert sorted(prompts) == list(range(9))


def test_a_warm_up_that_fails_ends_it() -> None:
    async def play() -> None:
        async with serving(answers(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")) as url:
            with pytest.raises(ConfigError, match="does not answer as OpenAI's API does: 404"):
                await measure_sweep(
                    Target(url), "/x", [], lambda count: [{}] * count, time_limit=20, warm_up=1, limits=None
                )

    asyncio.run(play())
