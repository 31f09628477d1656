"""OpenTelemetry traces: one span for each generating request, with what it waited for, computed and gave as its parts.

Attributes have the names of OpenTelemetry's semantic conventions for HTTP and generative AI; what those have no name
for begins with ``shoal.``. The caller's ``traceparent`` header (W3C Trace Context) makes the span part of the caller's
trace. Prompts, answers and secrets are in none of it.

Needs the extra ``shoal[otel]``, so nothing imports this module unless traces are asked for. The library sends spans in
batches from a thread of its own and drops them when the collector is away: a request never waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.metrics.timeline import RequestTimeline
from shoal.server.request_log import Generated
from shoal.server.requests import ChatRequest, Generation

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
_REQUEST = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")
_TRACES = "/v1/traces"  # where a collector takes them, by the protocol's specification
_NANO = 10**9
_LARGEST = 2**63


def send_traces(endpoint: str) -> TracerProvider:
    """Where spans go: a collector's address, with the usual path if it has none. ``shutdown`` sends what is left."""
    if urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + _TRACES
    provider = TracerProvider(resource=Resource.create({"service.name": "shoal", "service.version": version("shoal")}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class Tracing:
    """Middleware around what generates. clock: the engine's."""

    def __init__(self, app: ASGIApp, tracer: Tracer, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._tracer = tracer
        self._clock = clock
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        operation = _OPERATIONS.get(scope.get("path", ""))
        if scope["type"] != "http" or operation is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        span = self._tracer.start_span(
            operation,
            self._propagator.extract(headers),
            SpanKind.SERVER,
            {"http.request.method": "POST", "http.route": scope["path"], "url.path": scope["path"]},
        )
        status: int | None = None

        async def send_and_see(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_see)
        finally:
            self._end(span, operation, scope["state"], status)

    def _end(self, span: Span, operation: str, state: Mapping[str, Any], status: int | None) -> None:
        generated: Generated | None = state.get("generated")
        error: str | None = state.get("error_code")
        span.set_attribute("shoal.request.id", state["request_id"])
        if status is not None:
            span.set_attribute("http.response.status_code", status)
        if error is not None:
            span.set_attribute("error.type", error)
            if status is None or status < 400 or status >= 500:  # a wrong request is the caller's error
                span.set_status(Status(StatusCode.ERROR))
        if generated is not None:
            span.update_name(f"{operation} {generated.model}")
            span.set_attributes(dict(_attributes(operation, generated)))
            for line in generated.tally.timelines:
                self._add_parts(span, line)
        span.end()

    def _add_parts(self, span: Span, line: RequestTimeline) -> None:
        ahead = time.time_ns() - int(self._clock() * _NANO)
        first = line.first_token
        parts: tuple[tuple[str, float | None, float | None, dict[str, AttributeValue]], ...] = (
            ("queue", line.arrived, line.admitted, {}),
            ("prefill", line.admitted, first, {"shoal.cached_tokens": line.cached_tokens}),
            (
                "decode",
                first,
                line.finished,
                {"shoal.mean_batch": line.mean_batch or 0.0, "shoal.preemptions": line.preemptions},
            ),
        )
        context = set_span_in_context(span)
        for name, start, end, attributes in parts:
            if start is not None and end is not None:
                part = self._tracer.start_span(
                    name, context, SpanKind.INTERNAL, attributes, start_time=int(start * _NANO) + ahead
                )
                part.end(int(end * _NANO) + ahead)


def _attributes(operation: str, generated: Generated) -> Iterator[tuple[str, AttributeValue]]:
    body, tally = generated.body, generated.tally
    usage, timings = tally.usage(), tally.timings()
    yield "gen_ai.operation.name", operation
    yield "gen_ai.provider.name", "shoal"
    yield "gen_ai.request.model", body.model or generated.model
    yield "gen_ai.response.model", generated.model
    yield "gen_ai.response.id", generated.id
    for name in _REQUEST:
        value = getattr(body, name)
        if value is not None:
            # A seed may be larger than the protocol's integers, and one such span would cost the whole batch.
            yield f"gen_ai.request.{name}", value if abs(value) < _LARGEST else str(value)
    if (most := _max_tokens(body)) is not None:
        yield "gen_ai.request.max_tokens", most
    if body.stop:
        yield "gen_ai.request.stop_sequences", [body.stop] if isinstance(body.stop, str) else list(body.stop)
    if body.n is not None and body.n != 1:
        yield "gen_ai.request.choice.count", body.n
    yield "gen_ai.output.type", "text" if body.response_format is None else "json"
    yield "gen_ai.response.finish_reasons", tally.finish_reasons
    yield "gen_ai.usage.input_tokens", usage["prompt_tokens"]
    yield "gen_ai.usage.output_tokens", usage["completion_tokens"]
    yield "gen_ai.usage.cache_read.input_tokens", tally.cached_tokens
    for theirs, ours in (("time_in_queue", "queue_s"), ("time_to_first_token", "ttft_s"), ("e2e", "total_s")):
        if (seconds := timings[ours]) is not None:
            yield f"gen_ai.latency.{theirs}", seconds
    yield "shoal.compute_seconds", timings["compute_s"] or 0.0


def _max_tokens(body: Generation) -> int | None:
    more = body.max_completion_tokens if isinstance(body, ChatRequest) else None
    return body.max_tokens if more is None else more
