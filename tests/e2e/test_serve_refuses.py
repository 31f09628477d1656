"""``shoal serve`` when it cannot: one line that says what to do, and exit status 2."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from served import LAUNCH


def serve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LAUNCH, "serve", *arguments],
        env={**os.environ, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = serve("--port", str(port), "--model", "whatever.gguf")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: port: cannot listen on 127.0.0.1 port {port}: Address already in use; "
        "choose another with --port, or 0 for any that is free"
    ]


def test_a_host_that_is_not_here() -> None:
    done = serve("--port", "0", "--host", "no.such.host.invalid", "--model", "whatever.gguf")
    assert done.returncode == 2
    assert done.stderr.startswith("error: host: 'no.such.host.invalid' is no address of this machine")


def test_a_missing_model(tmp_path: Path) -> None:
    done = serve("--port", "0", "--model", str(tmp_path / "missing.gguf"))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "missing.gguf" in done.stderr


def test_a_broken_model(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF is not what follows")
    done = serve("--port", "0", "--model", str(tmp_path / "broken.gguf"))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "broken.gguf" in done.stderr


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--port", "70000"),
        ("--grace", "-1"),
        ("--max-body-bytes", "5"),
        ("--served-name", " "),
        ("--precision", "int3"),
        ("--api-keys", "no-such-file.toml"),
        ("--max-wait", "-1"),
        ("--request-timeout", "0"),
        ("--body-timeout", "0"),
        ("--write-timeout", "0"),
        ("--step-timeout", "-1"),
        ("--max-connections", "0"),
        ("--cors-origin", "example.com"),
        ("--allowed-host", "http://example.com/"),
        ("--otlp-endpoint", "localhost:4317"),
    ],
)
def test_a_bad_flag(flag: str, value: str) -> None:
    done = serve(flag, value)
    assert done.returncode == 2
    assert flag in done.stderr


def test_options_that_contradict_each_other(tmp_path: Path) -> None:
    done = serve("--log-prompts", "--no-log-requests")
    assert done.returncode == 2
    assert "--log-prompts" in done.stderr
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nname = "a"\nsecret = "0123456789abcdef"\npriority = 2\n')
    done = serve("--api-keys", str(keys), "--policy", "fcfs")
    assert done.returncode == 2
    assert "--api-keys" in done.stderr
    assert "--policy fcfs" in done.stderr


def test_keys_in_the_environment_that_are_none() -> None:
    done = serve(SHOAL_API_KEYS="bob:hidden,alice:two words")
    assert done.returncode == 2
    assert "SHOAL_API_KEYS, item 2" in done.stderr
    assert not {"hidden", "two", "words"} & set(done.stderr.replace(":", " ").split())
