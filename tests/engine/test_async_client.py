from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from engine_support import Recorder, make_engine, make_request

from shoal.backends.null import Fault
from shoal.core.params import SamplingParams
from shoal.core.request import FinishReason
from shoal.engine.client import AsyncClient, Stream
from shoal.engine.messages import Chunk
from shoal.engine.thread import EngineThread
from shoal.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
)


@contextmanager
def serving(**options: Any) -> Iterator[EngineThread]:
    running = EngineThread(make_engine(**options))
    try:
        yield running
    finally:
        running.close()


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 5, **options})


async def read(stream: Stream) -> list[Chunk]:
    return [chunk async for chunk in stream]


def tokens(chunks: list[Chunk], index: int = 0) -> tuple[int, ...]:
    return tuple(token for chunk in chunks if chunk.index == index for token in chunk.token_ids)


def expected(prompt: list[int], **options: Any) -> tuple[int, ...]:
    engine = make_engine()
    outbox = Recorder()
    running = EngineThread(engine)
    running.submit(make_request("r", prompt=prompt, **options), outbox)
    running.close(drain=True)
    return outbox.result("r", 0)[0]


def test_many_streams_at_once() -> None:
    async def main(engine: EngineThread) -> None:
        client = AsyncClient(engine)
        streams = [await client.submit([1 + i], params(max_tokens=3 + i)) for i in range(20)]
        for index, chunks in enumerate(await asyncio.gather(*map(read, streams))):
            assert tokens(chunks) == expected([1 + index], max_tokens=3 + index)
            assert chunks[-1].finish is FinishReason.LENGTH
            assert chunks[-1].timeline is not None

    with serving() as engine:
        asyncio.run(main(engine))


def test_several_completions_come_on_one_stream() -> None:
    async def main(engine: EngineThread) -> None:
        stream = await AsyncClient(engine).submit([1], params(n=3, temperature=1.0, seed=3))
        chunks = await read(stream)
        assert stream.seed == 3
        assert [len(tokens(chunks, index)) for index in range(3)] == [5, 5, 5]
        assert sum(chunk.finish is not None for chunk in chunks) == 3

    with serving() as engine:
        asyncio.run(main(engine))


def test_a_slow_reader_gets_fewer_larger_chunks_and_never_stops_the_engine() -> None:
    async def main(engine: EngineThread) -> None:
        client = AsyncClient(engine)
        slow = await client.submit([1], params(max_tokens=40))
        fast = await client.submit([2], params(max_tokens=41))
        await read(fast)
        (chunk,) = await read(slow)
        assert chunk.token_ids == expected([1], max_tokens=40)
        assert chunk.finish is FinishReason.LENGTH

    with serving() as engine:
        asyncio.run(main(engine))


def test_max_tokens_zero_needs_no_engine() -> None:
    async def main(engine: EngineThread) -> None:
        chunks = await read(await AsyncClient(engine).submit([1], params(max_tokens=0, n=2)))
        assert [(chunk.index, chunk.text, chunk.finish) for chunk in chunks] == [
            (0, "", FinishReason.LENGTH),
            (1, "", FinishReason.LENGTH),
        ]
        assert engine.stats.steps == 0

    with serving() as engine:
        asyncio.run(main(engine))


def test_wrong_requests_and_a_full_queue_are_refused_at_submit() -> None:
    async def main(engine: EngineThread) -> None:
        client = AsyncClient(engine)
        with pytest.raises(InvalidRequestError):
            await client.submit([], params())
        accepted = 0
        with contextlib.suppress(QueueFullError):
            for _ in range(5):
                await client.submit([1], params())
                accepted += 1
        # Two wait, and one may have been taken off the queue meanwhile.
        assert len(client._streams) == accepted
        assert accepted in {2, 3}
        gate.set()

    gate = threading.Event()
    with serving(max_num_seqs=1, max_waiting=2, gate=gate) as engine:
        asyncio.run(main(engine))


@pytest.mark.parametrize("way", ["aclose", "with", "cancel"])
def test_leaving_early_aborts(way: str) -> None:
    async def main(engine: EngineThread) -> None:
        client = AsyncClient(engine)
        stream = await client.submit([1], params(max_tokens=1000))
        if way == "aclose":
            await anext(stream)
            await stream.aclose()
            await stream.aclose()
        elif way == "with":
            async with stream:
                await anext(stream)
        else:
            reader = asyncio.create_task(read(stream))
            await read(await client.submit([2], params()))  # both have run a while now
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
        assert await read(stream) == []
        await read(await client.submit([2], params(max_tokens=3)))
        assert client._streams == {}

    with serving(context_length=2048) as engine:
        asyncio.run(main(engine))
        assert engine.stats.generated_tokens < 1000
        assert engine.stats.scheduler.used_blocks == 0


def test_a_failed_request_raises_after_its_last_chunk() -> None:
    async def main(engine: EngineThread) -> None:
        client = AsyncClient(engine)
        stream = await client.submit([1], params())
        chunks = [await anext(stream)]
        while chunks[-1].finish is None:
            chunks.append(await anext(stream))
        assert len(tokens(chunks)) == 2
        assert chunks[-1].finish is FinishReason.ERROR
        with pytest.raises(RequestFailedError, match="scripted"):
            await anext(stream)
        assert len(tokens(await read(await client.submit([1], params())))) == 5

    with serving(faults=(Fault(request_id="request-1", kind="raise", after=2),)) as engine:
        asyncio.run(main(engine))


def test_another_event_loop_is_refused_clearly() -> None:
    with serving() as engine:
        client = AsyncClient(engine)

        async def use() -> None:
            await read(await client.submit([1], params()))

        asyncio.run(use())
        with pytest.raises(EngineError, match="belongs to another event loop"):
            asyncio.run(use())


def test_two_clients_in_two_loops_share_an_engine() -> None:
    results: list[tuple[int, ...]] = []

    async def use(engine: EngineThread) -> None:
        results.append(tokens(await read(await AsyncClient(engine).submit([1], params(max_tokens=30)))))

    with serving() as engine:
        threads = [threading.Thread(target=lambda: asyncio.run(use(engine))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
    assert results == [expected([1], max_tokens=30)] * 2


def test_a_loop_that_ends_with_open_streams_leaves_nothing_behind() -> None:
    async def leave(engine: EngineThread) -> None:
        await anext(await AsyncClient(engine).submit([1], params(max_tokens=1000)))

    with serving(context_length=2048) as engine:
        asyncio.run(leave(engine))
        outbox = Recorder()
        engine.submit(make_request("other", max_tokens=400), outbox)
        engine.close(drain=True)
        assert outbox.result("other", 0)[2] is FinishReason.LENGTH


def test_a_dead_engine_ends_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(engine: EngineThread) -> None:
        client = AsyncClient(engine)
        streams = [await client.submit([1], params()) for _ in range(3)]
        gate.set()
        for result in await asyncio.gather(*map(read, streams), return_exceptions=True):
            assert isinstance(result, EngineDeadError)
        with pytest.raises(EngineDeadError):
            await client.submit([1], params())

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("the books are wrong")

    gate = threading.Event()
    engine = make_engine(gate=gate)
    monkeypatch.setattr(engine._scheduler, "commit", broken)
    running = EngineThread(engine)
    asyncio.run(main(running))
    running.close()


def test_closing_the_engine_ends_streams_as_aborted() -> None:
    async def main(engine: EngineThread) -> None:
        client = AsyncClient(engine)
        stream = await client.submit([1], params(max_tokens=4900))
        await anext(stream)
        await asyncio.to_thread(engine.close)
        assert (await read(stream))[-1].finish is FinishReason.ABORT
        with pytest.raises(EngineClosedError):
            await client.submit([1], params())

    with serving(context_length=5000, blocks=320) as engine:
        asyncio.run(main(engine))
