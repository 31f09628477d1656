"""API keys and the log, with the installed command and the official client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from served import ServerProcess

pytestmark = pytest.mark.model
FILE = '[[key]]\nname = "bob"\nsecret = "secret-of-bob"\npriority = -1\nmax_concurrent = 2\n'
MESSAGES: list[Any] = [{"role": "user", "content": "A question of mine."}]


def test_keys_from_a_file_and_the_environment(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(FILE)
    keys = ("--api-keys", str(tmp_path / "keys.toml"), "--host", "0.0.0.0", "--log-prompts")
    with ServerProcess(model_path, tmp_path, *keys, SHOAL_API_KEYS="alice:secret-of-alice") as server:

        def client(secret: str) -> openai.OpenAI:
            return openai.OpenAI(base_url=f"{server.address}/v1", api_key=secret, max_retries=0, timeout=60)

        def ask(secret: str, **more: Any) -> str | None:
            with client(secret) as session:
                answer = session.chat.completions.create(
                    model=str(server.facts["model"]), messages=MESSAGES, temperature=0, max_tokens=8, **more
                )
            return answer.choices[0].message.content

        said = ask("secret-of-alice")
        assert said
        assert ask("secret-of-bob") == said
        with pytest.raises(openai.AuthenticationError) as unknown:
            ask("secret-of-carol")
        assert unknown.value.code == "invalid_api_key"
        with pytest.raises(openai.BadRequestError) as high:
            ask("secret-of-bob", extra_body={"priority": 5})
        assert high.value.param == "priority"
        assert httpx.get(f"{server.address}/v1/models").status_code == 401
        assert httpx.get(f"{server.address}/health").status_code == 200
        metrics = httpx.get(f"{server.address}/metrics", headers={"authorization": "Bearer secret-of-alice"}).text
        assert 'shoal_key_requests_total{key="bob"} 1.0' in metrics
        assert server.stop() == 0
    log = server.log.read_text()
    assert "warning" not in log
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    generated = [line for line in lines if line.get("completion_tokens")]
    assert [(line["key"], line["answers"], line["prompt"]) for line in generated] == [
        ("alice", [said], MESSAGES),
        ("bob", [said], MESSAGES),
    ]
    assert [(line["status"], line["error"]) for line in lines if "error" in line] == [
        (401, "invalid_api_key"),
        (400, "invalid_request_error"),
        (401, "invalid_api_key"),
    ]
    for secret in ("secret-of-alice", "secret-of-bob", "secret-of-carol"):
        assert secret not in log


def test_everybody_is_warned_about(model_path: Path, tmp_path: Path) -> None:
    with ServerProcess(model_path, tmp_path, "--host", "0.0.0.0") as server:
        httpx.post(f"{server.address}/v1/completions", json={"prompt": "a secret", "max_tokens": 2})
        assert server.stop() == 0
    log = server.log.read_text()
    assert "warning: everybody who can reach 0.0.0.0 may use this server; --api-keys says who may" in log
    assert "a secret" not in log
    assert '"path": "/v1/completions"' in log


def test_a_quiet_log(model_path: Path, tmp_path: Path) -> None:
    with ServerProcess(model_path, tmp_path, "--no-log-requests") as server:
        httpx.get(f"{server.address}/health")
        assert server.stop() == 0
    assert "/health" not in server.log.read_text()
