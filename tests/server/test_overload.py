"""More work than fits: who is refused, when to come back, and who goes first."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import httpx
import pytest
from http_server import served_over_http
from server_support import COMPLETIONS, Client, events, run
from test_access import bearer, key

from shoal.backends.null import Fault
from shoal.config import EngineConfig, ServerConfig
from shoal.core.params import SamplingParams


def body(tokens: int, prompt: str = "a", **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **more}


@pytest.mark.parametrize("limit", ["queue", "wait"])
def test_whoever_waits_as_told_is_served(limit: str) -> None:
    """A step takes 5 ms here, so how long everything takes is known, and so is when there is room."""
    pause = 0.005

    async def main(address: str) -> None:
        async with httpx.AsyncClient(base_url=address, timeout=60) as client:
            first = await client.post(COMPLETIONS, json=body(20))  # from which it learns how long a step takes
            assert first.status_code == 200
            running = [asyncio.create_task(client.post(COMPLETIONS, json=body(300)))]
            while not await gauge(client, "running"):
                await asyncio.sleep(0.01)
            running += [asyncio.create_task(client.post(COMPLETIONS, json=body(300))) for _ in range(2)]
            while await gauge(client, "waiting") < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.15)  # a prediction serves for a tenth of a second
            refused = await client.post(COMPLETIONS, json=body(5))
            assert refused.status_code == 429
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert refused.json()["error"]["code"] == {"queue": "queue_full", "wait": "wait_too_long"}[limit]
            seconds = int(refused.headers["retry-after"])
            # 900 tokens are ahead, and the queue has room again after 300.
            assert 1 <= seconds <= {"queue": 300, "wait": 900}[limit] * pause * 1.25 * 3
            await asyncio.sleep(seconds)
            assert (await client.post(COMPLETIONS, json=body(5))).status_code == 200
            assert [answer.status_code for answer in await asyncio.gather(*running)] == [200] * 3

    options: dict[str, Any] = {"max_num_seqs": 1, "max_waiting": 2 if limit == "queue" else 100}
    config = ServerConfig(max_wait=0 if limit == "queue" else 3)
    with served_over_http(server_config=config, on_step=lambda _: time.sleep(pause), **options) as address:
        asyncio.run(main(address))


async def gauge(client: httpx.AsyncClient, name: str) -> float:
    text = (await client.get("/metrics")).text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"shoal_completions_{name} "))


def test_a_short_wait_is_not_refused_and_higher_priority_does_not_wait() -> None:
    gate = threading.Event()

    async def play(client: Client) -> None:
        gate.set()
        await client.whole(COMPLETIONS, body(20))
        stats = client.served.engine.stats
        assert stats.step_seconds > 0
        assert stats.busy_seconds >= stats.step_seconds
        gate.clear()
        held = [asyncio.create_task(client.post(COMPLETIONS, body(200))) for _ in range(5)]
        while client.served.engine._inbox._submitted + stats.scheduler.waiting < 4:
            await asyncio.sleep(0)
            stats = client.served.engine.stats
        served = client.served
        # Four or five completions of 200 tokens are ahead.
        wait = served.client.predicted_wait(served.pace)
        assert 800 * served.pace.step_seconds <= wait <= 1010 * served.pace.step_seconds
        assert served.client.predicted_wait(served.pace, priority=1) == 0
        gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*held)] == [200] * 5

    run(play, gate=gate, max_num_seqs=1, context_length=512)


def test_one_key_cannot_have_the_whole_queue() -> None:
    gate = threading.Event()

    async def play(client: Client) -> None:
        def ask(name: str, n: int = 1) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(client.post(COMPLETIONS, body(3, n=n), **bearer(name)))

        async def submitted(count: int) -> None:
            while len(client.served.client._backlog) < count:
                await asyncio.sleep(0)

        held = [ask("a") for _ in range(5)]
        await submitted(5)
        refused = await ask("a", n=3)
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["code"], "5 of 12 places" in error["message"]) == ("queue_full", True)
        held.append(ask("a"))
        await submitted(6)
        assert (await ask("a")).status_code == 429
        held += [ask("b", n=2), ask("c")]
        await submitted(9)
        gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*held)] == [200] * 8

    run(play, gate=gate, max_num_seqs=1, max_waiting=12, keys=[key("a"), key("b"), key("c")])


def order_of_service(keys: Any, asked: list[tuple[str, dict[str, Any]]], **options: Any) -> list[int]:
    """Queue requests in this order behind one that holds the only slot; in which order they finish."""
    gate = threading.Event()
    finished: list[int] = []

    async def play(client: Client) -> None:
        async def ask(number: int, name: str, more: dict[str, Any]) -> None:
            answer = await client.post(COMPLETIONS, body(4, **more), **bearer(name))
            assert answer.status_code == 200, answer.text
            finished.append(number)

        first = asyncio.create_task(client.post(COMPLETIONS, body(4), **bearer(asked[0][0])))
        while len(client.served.client._backlog) < 1:
            await asyncio.sleep(0)
        tasks = []
        for number, (name, more) in enumerate(asked):
            tasks.append(asyncio.create_task(ask(number, name, more)))
            while len(client.served.client._backlog) < number + 2:
                await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, *tasks)

    run(play, gate=gate, keys=keys, config=EngineConfig(max_num_seqs=1, **options))
    return finished


def test_keys_take_turns_whoever_came_first() -> None:
    asked = [("a", {})] * 6 + [("b", {})] * 3
    # "a" had the slot before, so "b" is next; from then on in turns.
    assert order_of_service([key("a"), key("b")], asked) == [6, 0, 7, 1, 8, 2, 3, 4, 5]


def test_without_several_keys_who_came_first_is_first() -> None:
    assert order_of_service([key("a")], [("a", {})] * 4) == [0, 1, 2, 3]


def test_a_key_of_higher_priority_goes_first() -> None:
    keys = [key("low", priority=-1), key("high")]
    assert order_of_service(keys, [("low", {}), ("low", {}), ("high", {}), ("high", {})]) == [2, 3, 0, 1]


def test_a_priority_in_the_body_displaces_what_runs() -> None:
    """With its memory: the one displaced is computed again, and says the same as alone."""

    async def play(client: Client) -> None:
        alone = await client.whole(COMPLETIONS, body(200, "low", temperature=0))
        low = asyncio.create_task(client.whole(COMPLETIONS, body(200, "low", temperature=0)))
        while client.served.engine.stats.generated_tokens < 220:
            await asyncio.sleep(0.001)
        await client.whole(COMPLETIONS, body(20, "high", priority=1))
        assert not low.done()
        assert client.served.engine.stats.scheduler.preemptions == 1
        assert (await low)["choices"] == alone["choices"]

    run(play, on_step=lambda _: time.sleep(0.002), max_num_seqs=1)


def test_a_client_that_goes_away_frees_its_blocks_within_one_step() -> None:
    gate = threading.Event()

    async def play(client: Client) -> None:
        stream = client.served.client.queue(
            [client.served.client.resolve([1, 2, 3], _params(400)), client.served.client.resolve([4], _params(400))]
        )
        while client.served.engine.stats.scheduler.running < 2:
            gate.set()
            await asyncio.sleep(0)
            gate.clear()
        other = asyncio.create_task(client.post(COMPLETIONS, body(100, "other")))
        while len(client.served.client._backlog) < 3:
            await asyncio.sleep(0)
        await stream.aclose()
        before = client.served.engine.stats.steps
        gate.set()
        while client.served.engine.stats.scheduler.running + client.served.engine.stats.scheduler.waiting > 1:
            await asyncio.sleep(0)
        # The step that was held at the gate, and the one that takes the abort.
        assert client.served.engine.stats.steps <= before + 2
        assert (await other).status_code == 200

    run(play, gate=gate, on_step=lambda _: time.sleep(0.005))


def _params(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_ends_with_an_error(stream: bool) -> None:
    async def play(client: Client) -> None:
        answer = await client.post(COMPLETIONS, body(490, stream=stream))
        if stream:
            assert answer.status_code == 200
            *texts, last = [json.loads(line) for line in events(answer.text)]
            assert texts
            error = last["error"]
        else:
            assert answer.status_code == 504
            error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "request_timeout")
        while client.served.engine.stats.scheduler.running:  # it was aborted
            await asyncio.sleep(0)
        assert client.served.engine.stats.generated_tokens < 400
        assert (await client.whole(COMPLETIONS, body(4)))["choices"]

    run(play, server=ServerConfig(request_timeout=1), on_step=lambda _: time.sleep(0.005))


def test_a_request_that_waits_too_long_in_the_queue_ends_with_an_error() -> None:
    gate = threading.Event()

    async def play(client: Client) -> None:
        answers = await asyncio.gather(*(client.post(COMPLETIONS, body(4)) for _ in range(3)))
        assert [answer.status_code for answer in answers] == [504] * 3
        gate.set()
        assert (await client.whole(COMPLETIONS, body(4)))["choices"]

    run(play, gate=gate, server=ServerConfig(request_timeout=1), max_num_seqs=1)


def test_prompts_are_logged_on_request_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shoal.requests")

    async def play(client: Client) -> None:
        texts = await client.whole(COMPLETIONS, body(5, "a secret", n=2, temperature=1))
        fields = caplog.records[-1].fields  # type: ignore[attr-defined]
        assert fields["prompt"] == "a secret"
        assert fields["answers"] == [choice["text"] for choice in texts["choices"]]
        messages = [{"role": "user", "content": "another secret"}]
        await client.stream("/v1/chat/completions", {"messages": messages, "max_tokens": 3})
        assert caplog.records[-1].fields["prompt"] == messages  # type: ignore[attr-defined]

    run(play, server=ServerConfig(log_prompts=True))


def test_the_guilty_fail_alone() -> None:
    """A step that raises for one request and an error result of another, in one batch with a third."""

    async def play(client: Client) -> None:
        answers = await asyncio.gather(*(client.post(COMPLETIONS, body(50, prompt)) for prompt in "abc"))
        assert sorted(answer.status_code for answer in answers) == [200, 500, 500]

    run(
        play, faults=(Fault(request_id="request-1", kind="raise", after=5), Fault(request_id="request-2", kind="error"))
    )
