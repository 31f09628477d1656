"""An engine that fails ends the process: whoever waits is told, a message says why, and nothing hangs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

PROGRAM = Path(__file__).parent / "failing_server.py"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("broken", "the engine stopped on an internal error: RuntimeError: the books are wrong"),
        ("stuck", "a step of the engine has not ended in 1 s (--step-timeout)"),
    ],
)
def test_the_process_ends(tmp_path: Path, kind: str, message: str, stream: bool) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    command = [sys.executable, str(PROGRAM), kind, "serve", "--json", "--port", "0", "--step-timeout", "1"]
    with subprocess.Popen(
        [*command, "-m", str(model)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            address = json.loads(process.stdout.readline())["address"]
            body = {"prompt": "a", "max_tokens": 50, "ignore_eos": True, "stream": stream}
            answer = httpx.post(f"{address}/v1/completions", json=body, timeout=30)
            if kind == "broken" or not stream:
                assert answer.status_code == 503
                error = answer.json()["error"]
            else:  # two steps were good
                error = json.loads(answer.text.split("data: ")[-2])["error"]
            assert (error["code"], error["message"]) == ("engine_unavailable", message)
            _health_fails(address)
            _, said = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 1
    lines = said.strip().splitlines()
    assert lines[-1] == f"error: {message}"
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    failure = next(line for line in logged if line["level"] == "error")
    assert message in failure["traceback"]


def _health_fails(address: str) -> None:
    """At once, and until it is gone."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            assert httpx.get(f"{address}/health", timeout=10).status_code == 503
        except httpx.TransportError:
            return
    raise AssertionError("the process does not end")
