"""Spans: what they are called, what they say, whose they are, and that they reach a collector."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from otlp_collector import collector
from server_support import CHAT, COMPLETIONS, HELLO, Client, run

from shoal.backends.null import Fault
from shoal.server.run import _tracing
from shoal.server.tracing import Tracing, send_traces

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


def spans_of(play: Callable[[Client], Any], **options: Any) -> list[ReadableSpan]:
    """Those of requests, without their parts, in order."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    run(play, traced=partial(Tracing, tracer=provider.get_tracer("shoal")), **options)
    found = list(exporter.get_finished_spans())
    parts = [span for span in found if span.kind is SpanKind.INTERNAL]
    whole = [span for span in found if span.kind is SpanKind.SERVER]
    for span in whole:
        own = [part for part in parts if part.parent == span.context]
        assert len({part.name for part in own}) == len(own)
        for part in own:
            assert span.start_time is not None
            assert part.end_time is not None
            assert part.start_time is not None
            # The two clocks were read one after the other.
            assert span.start_time - 10**7 <= part.start_time <= part.end_time <= (span.end_time or 0) + 10**7
    assert all(part.parent in [span.context for span in whole] for part in parts)
    return whole


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_span_says(stream: bool) -> None:
    body = {
        **HELLO,
        "model": "fake",
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 2**64 - 1,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.5,
        "stop": ["é"],
        "n": 2,
        "stream": stream,
    }

    async def play(client: Client) -> None:
        answer = await client.post(CHAT, body, traceparent=TRACEPARENT, **{"x-request-id": "mine"})
        assert answer.status_code == 200

    (span,) = spans_of(play)
    assert span.name == "chat fake"
    assert span.context is not None
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    found = attributes(span)
    assert found.pop("gen_ai.response.id").startswith("chatcmpl-")
    for name in ("time_in_queue", "time_to_first_token", "e2e"):
        assert found.pop(f"gen_ai.latency.{name}") >= 0
    assert found.pop("shoal.compute_seconds") > 0
    assert found == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "url.path": CHAT,
        "http.response.status_code": 200,
        "shoal.request.id": "mine",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "shoal",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 40,
        "gen_ai.request.seed": str(2**64 - 1),
        "gen_ai.request.presence_penalty": 0.25,
        "gen_ai.request.frequency_penalty": 0.5,
        "gen_ai.request.stop_sequences": ("é",),
        "gen_ai.request.choice.count": 2,
        "gen_ai.output.type": "text",
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": len("user: Hello\n"),
        "gen_ai.usage.output_tokens": 14,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }


def test_errors_and_other_paths() -> None:
    async def play(client: Client) -> None:
        await client.refused(COMPLETIONS, {"prompt": "a", "temperature": -1})
        await client.refused(COMPLETIONS, {"prompt": "a"}, 500)
        await client.http.get("/health")
        await client.http.get(COMPLETIONS)
        await client.post("/tokenize", {"prompt": "a"})
        await client.post(COMPLETIONS, {"prompt": "a"}, traceparent="nonsense")

    wrong, failed, good = spans_of(play, faults=(Fault(request_id="request-1", kind="error"),))
    assert (wrong.name, wrong.status.is_ok) == ("text_completion", True)
    assert attributes(wrong)["error.type"] == "invalid_value"
    assert attributes(wrong)["http.response.status_code"] == 400
    assert (failed.name, failed.status.is_ok) == ("text_completion fake", False)
    assert attributes(failed)["error.type"] == "request_failed"
    assert attributes(failed)["gen_ai.usage.output_tokens"] == 0
    assert good.parent is None
    assert "error.type" not in attributes(good)


def test_a_collectors_address_has_a_usual_path() -> None:
    with collector() as (address, came):
        for endpoint in (address, f"{address}/", f"{address}/v1/traces"):
            provider = send_traces(endpoint)
            provider.get_tracer("t").start_span("s").end()
            provider.shutdown()
    assert len(came) == 3


def test_without_the_library_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shoal.server.tracing", None)
    with pytest.raises(Exception, match=r"pip install 'shoal\[otel\]'"), _tracing("http://localhost:1"):
        pass
