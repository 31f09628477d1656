"""What Prometheus is told adds up."""

from __future__ import annotations

import asyncio
import threading
import time

from prometheus_client.parser import text_string_to_metric_families
from server_support import CHAT, COMPLETIONS, HELLO, Client, run
from test_faults import Connection

from shoal.backends.null import Fault

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(client: Client) -> Samples:
    answer = await client.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    found: Samples = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.name.startswith(("shoal_", "process_"))
        assert family.documentation
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"shoal_{name}", tuple(sorted(labels.items()))]


def total(samples: Samples, name: str) -> float:
    return sum(number for (found, _), number in samples.items() if found == f"shoal_{name}")


def test_at_the_beginning_everything_is_there_and_zero() -> None:
    async def play(client: Client) -> None:
        samples = await scrape(client)
        assert value(samples, "ready") == value(samples, "info", version="0.0.0", model="fake") == 1
        assert samples["process_resident_memory_bytes", ()] > 0
        for name in ("generated_tokens_total", "prompt_tokens_total", "steps_total", "request_seconds_count"):
            assert value(samples, name) == 0
        assert value(samples, "kv_blocks") == 128
        assert total(samples, "http_requests_total") == 0
        assert total(await scrape(client), "http_requests_total") == 1

    run(play)


def test_counters_add_up_after_a_load() -> None:
    gate, slowly = threading.Event(), threading.Event()
    gate.set()

    async def play(client: Client) -> None:
        bodies = [{"prompt": "abc" * number, "max_tokens": number + 2, "n": 1 + number % 3} for number in range(1, 13)]
        answers = await asyncio.gather(*(client.whole(COMPLETIONS, body) for body in bodies))
        await client.stream(CHAT, {**HELLO, "max_tokens": 20})
        await client.refused(CHAT, {**HELLO, "temperature": -1})
        await client.refused("/nothing/here", {}, 404)
        await client.http.get("/v1/models/fake")
        gone = Connection(client, CHAT, {**HELLO, "stream": True, "max_tokens": 480, "ignore_eos": True})
        slowly.set()  # a step or two at a time, so that it is not done before its client leaves
        task = gone.start()
        while not gone.received.is_set():
            gate.set()
            await asyncio.sleep(0)
        gone.leave()
        await task
        slowly.clear()
        gate.set()
        while client.served.engine.stats.scheduler.running:
            await asyncio.sleep(0.001)
        samples = await scrape(client)
        assert value(samples, "http_requests_total", endpoint=COMPLETIONS, status="200") == 12
        assert value(samples, "http_requests_total", endpoint=CHAT, status="200") == 1
        assert value(samples, "http_requests_total", endpoint=CHAT, status="400") == 1
        assert value(samples, "http_requests_total", endpoint=CHAT, status="499") == 1
        assert value(samples, "http_requests_total", endpoint="other", status="404") == 1
        assert value(samples, "http_requests_total", endpoint="/v1/models", status="200") == 1
        completions = sum(body["n"] for body in bodies) + 2
        assert total(samples, "completions_finished_total") == completions
        assert value(samples, "completions_finished_total", reason="abort") == 1
        assert value(samples, "completions_finished_total", reason="length") == completions - 1
        hello = len("user: Hello\n")
        prompts = sum(answer["usage"]["prompt_tokens"] for answer in answers)
        assert value(samples, "prompt_tokens_total") == prompts + 2 * hello
        generated = sum(answer["usage"]["completion_tokens"] for answer in answers)
        stats = client.served.engine.stats
        assert value(samples, "generated_tokens_total") == stats.generated_tokens >= generated + 20
        for name in ("queue_seconds", "time_to_first_token_seconds", "request_seconds"):
            assert value(samples, f"{name}_count") == 13
        gaps = sum((body["max_tokens"] - 1) * body["n"] for body in bodies) + 19
        assert value(samples, "inter_token_seconds_count") == gaps
        assert value(samples, "batch_size_count") == value(samples, "steps_total") == stats.steps
        assert value(samples, "batch_size_sum") == stats.step_sequences
        assert value(samples, "step_tokens_sum") == stats.step_rows
        for name in ("completions_running", "completions_waiting", "kv_blocks_used", "kv_used_ratio"):
            assert value(samples, name) == 0

    run(play, gate=gate, on_step=lambda step: gate.clear() if slowly.is_set() else None)


def test_labels_are_few_whatever_is_asked_for() -> None:
    async def play(client: Client) -> None:
        for number in range(30):
            await client.http.get(f"/made/up/{number}")
            await client.http.get(f"/v1/models/{number}")
        samples = await scrape(client)
        labels = {key for key in samples if key[0] == "shoal_http_requests_total"}
        assert len(labels) == 2

    run(play)


def test_a_request_that_failed_counts_as_that() -> None:
    async def play(client: Client) -> None:
        await client.refused(COMPLETIONS, {"prompt": "a"}, 500)
        samples = await scrape(client)
        assert value(samples, "completions_finished_total", reason="error") == 1
        assert value(samples, "http_requests_total", endpoint=COMPLETIONS, status="500") == 1
        assert value(samples, "http_errors_total", code="request_failed") == 1
        await client.post(
            COMPLETIONS, {"prompt": "a", "stream": True, "max_tokens": 200}
        )  # which fails after it has begun
        samples = await scrape(client)
        assert value(samples, "completions_finished_total", reason="error") == 2
        assert value(samples, "http_requests_total", endpoint=COMPLETIONS, status="200") == 1
        assert value(samples, "http_errors_total", code="request_failed") == 2

    faults = (
        Fault(request_id="request-1", kind="error"),
        Fault(request_id="request-2", kind="error", after=100),
    )
    run(play, faults=faults, on_step=lambda _: time.sleep(0.003))
