"""Nothing that clients do stops the server, changes another's answer, or is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
from http_server import served_over_http
from prometheus_client.parser import text_string_to_metric_families
from soak import COMPLETIONS, FAULTS, KEYS, SECRETS, Soak

from shoal.config import ServerConfig

CONFIG = ServerConfig(max_body_bytes=1 << 16, body_timeout=2, write_timeout=2, keep_alive=2)
Samples = Mapping[tuple[str, str], float]
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("seed", "bursts"), [(1, 8), pytest.param(2, 80, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_soak(seed: int, bursts: int) -> None:
    options = {"blocks": 48, "max_num_seqs": 8, "max_waiting": 24, "token_budget": 64}
    with served_over_http(
        server_config=CONFIG, keys=KEYS, faults=FAULTS, on_step=lambda _: time.sleep(0.0003), **options
    ) as address:
        soak = Soak(address, seed)
        sizes = [60 if number % 2 else 25 for number in range(bursts)]

        def load(part: list[int]) -> int:
            """Objects alive after it, when everything is quiet again."""

            async def play() -> None:
                for size in part:
                    await soak.burst(size)

            asyncio.run(play())
            wait_until_idle(address)
            gc.collect()
            return len(gc.get_objects())

        asyncio.run(soak.learn())
        load(sizes[: bursts // 2])
        memory = resident()
        before = load(sizes[:2])
        after = load(sizes[bursts // 2 :])
        asyncio.run(soak.control())
        wait_until_idle(address)
        # Not one object a request is kept, and pages that were freed are used again.
        requests = sum(sizes[bursts // 2 :])
        assert after - before < 300 + requests // 4
        assert resident() - memory < 24 * 2**20
        check_counters(scrape(address), soak)


def scrape(address: str) -> Samples:
    text = httpx.get(f"{address}/metrics", headers={"authorization": f"Bearer {SECRETS[0]}"}).text
    return {
        (
            sample.name.removeprefix("shoal_"),
            " ".join(value for _, value in sorted(sample.labels.items())),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def wait_until_idle(address: str) -> None:
    """Until gauges are zero, which they must become soon."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        samples = scrape(address)
        if not any(samples[name, ""] for name in ("completions_running", "completions_waiting", "kv_blocks_used")):
            return
        time.sleep(0.02)
    raise AssertionError("something goes on for ever")


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def check_counters(samples: Samples, soak: Soak) -> None:
    """What the server counted is what its clients saw."""
    tally = soak.tally

    def total(name: str) -> float:
        return sum(value for (found, _), value in samples.items() if found == name)

    # Whoever left was counted as that, or as answered if the answer had been sent.
    excess = -sum(tally.answered.values()) - samples["http_requests_total", "/metrics 200"]
    excess += total("http_requests_total")
    assert 0 <= excess <= tally.left
    for (path, status), count in tally.answered.items():
        found = samples["http_requests_total", f"{path} {status}"]
        assert found == count if status not in (200, 429) else count <= found <= count + tally.left
    assert tally.answered[COMPLETIONS, 429] > 0
    errors = sum(count for (_, status), count in tally.answered.items() if status >= 400)
    started = samples["http_errors_total", "request_failed"] - tally.answered[COMPLETIONS, 500]
    assert errors + started <= total("http_errors_total") <= errors + started + tally.left
    # Of the engine: every completion ended, the cursed with an error, and nobody else.
    assert samples["completions_finished_total", "error"] == tally.cursed > 0
    assert samples["completions_finished_total", "abort"] > 0
    assert samples["request_seconds_count", ""] <= total("completions_finished_total")
    assert samples["generated_tokens_total", ""] >= tally.tokens
    assert samples["prompt_tokens_total", ""] >= tally.prompts
    assert samples["preemptions_total", ""] > 0
    assert samples["prefix_hit_tokens_total", ""] > 0
    assert samples["steps_total", ""] == samples["batch_size_count", ""] == samples["step_tokens_count", ""]
    for kind in ("requests", "prompt_tokens", "generated_tokens"):
        assert samples[f"key_{kind}_total", "a"] > 0
        assert samples[f"key_{kind}_total", "b"] > 0
