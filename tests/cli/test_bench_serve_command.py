"""``shoal bench serve`` against a served null backend."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import Shell

sys.path.append(str(Path(__file__).parents[1] / "server"))

from http_server import served_over_http


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    # Steps take a little while, so that tokens come apart.
    with served_over_http(context_length=2048, blocks=1024, on_step=lambda step: time.sleep(0.002)) as address:
        yield f"{address}/v1"


@pytest.fixture
def shell() -> Shell:
    return Shell()


SMALL = ("--requests", "6", "--prompt-words", "8", "--output-tokens", "5")


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_sweep_of_rates(shell: Shell, url: str, endpoint: str, tmp_path: Path) -> None:
    out, chart = tmp_path / "out.json", tmp_path / "out.svg"
    done = shell(
        "bench", "serve", url, "--rate", "200,400", *SMALL, "--endpoint", endpoint, "--json", "-o", str(out),
        "--chart", str(chart), "--ttft", "60",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert json.loads(out.read_text()) == record
    assert [load["load"] for load in record["loads"]] == ["200/s", "400/s"]
    for load in record["loads"]:
        assert (load["succeeded"], load["requests"], load["errors"]) == (6, 6, {})
        assert load["output_tokens"] == 30
        assert load["cached_tokens"] == 0
        assert load["goodput"] == pytest.approx(load["finished_rate"])
        assert load["asked_rate"] in (200, 400)
    assert "400/s" in chart.read_text()


def test_so_many_at_once_as_a_table(shell: Shell, url: str) -> None:
    done = shell("bench", "serve", url, "--concurrency", "1,3", *SMALL)
    assert done.exit_code == 0, done.output
    assert "3 at once" in done.stdout
    assert "6/6" in done.stdout
    assert "good/s" not in done.stdout


def test_a_trace_and_a_file_of_prompts(shell: Shell, url: str, tmp_path: Path) -> None:
    trace, prompts = tmp_path / "trace.txt", tmp_path / "prompts.jsonl"
    trace.write_text("3.00\n3.01\n\n3.02\n")
    prompts.write_text(
        '{"id": "a", "prompt": "x", "max_tokens": 2}\n\n{"messages": [{"role": "user", "content": "y"}]}\n'
    )
    done = shell(
        "bench", "serve", url, "--trace", str(trace), "--prompts", str(prompts), "--json", "--warm-up", "0",
        "--extra", '{"max_tokens": 3}', "--model", "fake",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (load,) = json.loads(done.stdout)["loads"]
    assert (load["requests"], load["output_tokens"]) == (3, 9)
    assert load["asked_rate"] == pytest.approx(100)


def test_failures_are_told(shell: Shell, url: str) -> None:
    done = shell("bench", "serve", url, "--concurrency", "2", *SMALL, "--warm-up", "0", "--model", "other")
    assert done.exit_code == 1
    assert "6 of 6 failed: 404 model_not_found" in done.stderr


def test_nobody_there(shell: Shell) -> None:
    done = shell("bench", "serve", "http://127.0.0.1:9/v1", "--concurrency", "1")
    assert done.exit_code == 1
    assert "does not answer" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of"),
        (("--rate", "1", "--concurrency", "1"), "give one of"),
        (("--rate", "fast"), "--rate"),
        (("--rate", "1,0"), "--rate"),
        (("--concurrency", "1.5"), "--concurrency"),
        (("--rate", "1", "--burstiness", "0"), "--burstiness"),
        (("--rate", "1", "--endpoint", "responses"), "--endpoint"),
        (("--rate", "1", "--extra", "[1]"), "--extra"),
        (("--rate", "1", "--extra", "{"), "--extra"),
        (("--trace", "missing.txt"), "--trace"),
        (("--rate", "1", "--prompts", "missing.jsonl"), "--prompts"),
        (("--rate", "1", "--output", "no/such/folder/out"), "--output"),
        (("--rate", "1", "--requests", "0"), "--requests"),
    ],
)
def test_wrong_usage_names_the_flag(shell: Shell, url: str, arguments: tuple[str, ...], message: str) -> None:
    done = shell("bench", "serve", url, *arguments, env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert message in done.stderr
