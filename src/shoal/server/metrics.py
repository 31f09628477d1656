"""Numbers for Prometheus, at ``/metrics``.

The engine's are read when they are asked for, from the statistics that it publishes after each step; requests' times
are observed when a request ends. Labels have few values: an endpoint is one of the server's or "other". Names follow
Prometheus' own advice: a prefix, base units, ``_total`` for what only grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from shoal.engine.engine import SIZE_BOUNDS, EngineStats
from shoal.metrics.timeline import RequestTimeline
from shoal.server.service import Service

CONTENT_TYPE = CONTENT_TYPE_LATEST
_ENDPOINTS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ready",
        "/version",
        "/metrics",
    }
)
_OTHER = "other"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAPS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)


class Metrics:
    """One server's numbers, in a registry of their own."""

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "shoal_http_requests",
            "HTTP requests that ended, by endpoint and status; 499: the client left before the answer's end.",
            ["endpoint", "status"],
            registry=self._registry,
        )
        self._queue = self._histogram("queue_seconds", "Arrival of a request to its first computation.", _SECONDS)
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Arrival of a request to its first token.", _SECONDS
        )
        self._itl = self._histogram("inter_token_seconds", "Gaps between deliveries of one completion.", _GAPS)
        self._tpot = self._histogram("time_per_output_token_seconds", "Time per token after the first.", _GAPS)
        self._total = self._histogram("request_seconds", "Arrival of a request to its end.", _SECONDS)
        self._errors = Counter(
            "shoal_http_errors", "Requests that ended with an error, by its code.", ["code"], registry=self._registry
        )
        self._keys = {
            name: Counter(f"shoal_key_{name}", text, ["key"], registry=self._registry)
            for name, text in (
                ("requests", "Generating requests that ended, by API key."),
                ("prompt_tokens", "Tokens of the prompts of such requests."),
                ("generated_tokens", "Tokens generated for such requests."),
            )
        }
        self._registry.register(_EngineCollector(service))
        ProcessCollector(registry=self._registry)  # CPU time, memory and open files, under their usual names

    def observe(self, path: str, status: int | None, *, complete: bool) -> None:
        """A request has ended."""
        endpoint = "/v1/models" if path.startswith("/v1/models/") else path
        endpoint = endpoint if endpoint in _ENDPOINTS else _OTHER
        self._requests.labels(endpoint, str(status) if complete and status is not None else "499").inc()

    def observe_error(self, code: str) -> None:
        """A request has ended with this error; codes are the server's own words, so they are few."""
        self._errors.labels(code).inc()

    def observe_key(self, key: str, prompt_tokens: int, generated_tokens: int) -> None:
        """A generating request of a key's has ended."""
        for name, value in (("requests", 1), ("prompt_tokens", prompt_tokens), ("generated_tokens", generated_tokens)):
            self._keys[name].labels(key).inc(value)

    def observe_times(self, timelines: Iterable[RequestTimeline]) -> None:
        """Engine requests have ended."""
        for line in timelines:
            for histogram, value in (
                (self._queue, line.queue_time),
                (self._ttft, line.ttft),
                (self._tpot, line.tpot),
                (self._total, line.total),
            ):
                if value is not None:
                    histogram.observe(value)
            for gap in line.itl:
                self._itl.observe(gap)

    def render(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        return Histogram(f"shoal_{name}", text, buckets=bounds, registry=self._registry)


class _EngineCollector:
    """The engine's statistics as metrics."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Called for each scrape."""
        yield GaugeMetricFamily("shoal_ready", "Whether requests are taken.", value=float(self._service.ready))
        stats = self._service.stats
        if stats is None:
            return
        info = GaugeMetricFamily("shoal_info", "What runs here; always 1.", labels=["version", "model"])
        info.add_metric([self._service.version, self._service.served_name or ""], 1.0)
        yield info
        scheduler = stats.scheduler
        gauges = (
            ("completions_running", "Completions that run.", scheduler.running),
            ("completions_waiting", "Completions that wait for a place.", scheduler.waiting),
            ("kv_blocks", "Blocks of the KV cache.", scheduler.num_blocks),
            ("kv_blocks_used", "Blocks that hold tokens of running completions.", scheduler.used_blocks),
            ("kv_blocks_cached", "Blocks with a prefix that another request may find.", scheduler.cached_blocks),
            ("kv_used_ratio", "Part of the blocks that is used.", scheduler.used_blocks / scheduler.num_blocks),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"shoal_{name}", text, value=float(value))
        counters = (
            ("prompt_tokens", "Tokens of prompts that came to run.", stats.prompt_tokens),
            ("generated_tokens", "Tokens generated.", stats.generated_tokens),
            ("prefix_hit_tokens", "Tokens found in the prefix cache instead of computed.", scheduler.prefix_hit_tokens),
            ("preemptions", "Completions that lost their blocks, to be computed again.", scheduler.preemptions),
            ("steps", "Steps of the engine.", stats.steps),
            (
                "busy_seconds",
                "Seconds in steps; the rate is the part of time at work.",
                stats.busy_seconds,
            ),
        )
        for name, text, value in counters:
            yield CounterMetricFamily(f"shoal_{name}", text, value=float(value))
        finished = CounterMetricFamily("shoal_completions_finished", "Completions that ended.", labels=["reason"])
        for reason, count in stats.finished.items():
            finished.add_metric([reason.value], float(count))
        yield finished
        yield from _sizes(stats)


def _sizes(stats: EngineStats) -> Iterator[Metric]:
    for name, text, counts, total in (
        ("batch_size", "Sequences of a step.", stats.batch_sizes, stats.step_sequences),
        ("step_tokens", "Tokens of a step.", stats.step_sizes, stats.step_rows),
    ):
        bounds = [*(str(bound) for bound in SIZE_BOUNDS), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(counts)), strict=True))
        yield HistogramMetricFamily(f"shoal_{name}", text, buckets=buckets, sum_value=float(total))
