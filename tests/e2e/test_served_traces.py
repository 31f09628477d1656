"""The installed command sends its traces to a collector."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest
from served import ServerProcess

sys.path.append(str(Path(__file__).parents[1] / "server"))

from otlp_collector import collector

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.mark.model
def test_traces_reach_a_collector(model_path: Path, tmp_path: Path) -> None:
    with collector() as (address, came):
        with ServerProcess(model_path, tmp_path, "--otlp-endpoint", address) as server:
            body = {"prompt": "A secret of mine.", "max_tokens": 5, "ignore_eos": True}
            httpx.post(f"{server.address}/v1/completions", json=body, headers={"traceparent": TRACEPARENT}, timeout=60)
            assert server.stop() == 0
        spans = [
            (resource.resource, span)
            for request in came
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
    assert {"prefill", "decode"} < {span.name for _, span in spans}
    ((resource, span),) = [pair for pair in spans if pair[1].name.startswith("text_completion")]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert {item.key: item.value.string_value for item in resource.attributes}["service.name"] == "shoal"
    numbers = {item.key: item.value.int_value for item in span.attributes}
    assert numbers["gen_ai.usage.output_tokens"] == 5
    assert "secret" not in str(spans)
