"""The server against its own OpenAPI description: schemathesis makes requests that fit it and requests that do not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from http_server import served_over_http
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS

from shoal.config import ServerConfig
from shoal.server.app import make_app
from shoal.server.service import Service


def description() -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        service = Service(version="0.0.0", clock=lambda: 0.0)
        app = make_app(service, ServerConfig(), logger=logging.getLogger("shoal.requests"))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            found: dict[str, Any] = (await http.get("/openapi.json")).json()
            return found

    return asyncio.run(ask())


SCHEMA = schemathesis.openapi.from_dict(description())
# What a body means (whether a prompt fits, a grammar compiles, a model is served here) is not in its description, so a
# body that fits may be refused.
EXCLUDED = [check for check in CHECKS.get_all() if check.__name__ == "positive_data_acceptance"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served_over_http(context_length=2048, blocks=256) as address:
        yield address


@SCHEMA.parametrize()
@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_answers_are_as_described(case: Any, address: str) -> None:
    case.call_and_validate(base_url=address, excluded_checks=EXCLUDED, timeout=60)
