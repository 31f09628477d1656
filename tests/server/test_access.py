"""API keys: where they come from, who gets in, and what each may use."""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_support import CHAT, COMPLETIONS, HELLO, Client, run

from shoal.config import ServerConfig
from shoal.errors import ConfigError
from shoal.server.access.api_key import ApiKey, digest_of, find
from shoal.server.access.key_sources import parse_keys, read_keys
from shoal.server.access.token_bucket import TokenBucket

BODY = {"prompt": "abc", "max_tokens": 8}


def key(name: str, **fields: Any) -> ApiKey:
    return ApiKey(name=name, digest=digest_of(f"secret-of-{name}"), **fields)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer secret-of-{name}"}


# Sources.


def test_keys_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(
        f"""
        [[key]]
        name = "web"
        secret = "abc"
        [[key]]
        name = "nightly"
        sha256 = "{digest_of("xyz").hex()}"
        priority = -1
        max_priority = 0
        weight = 0.5
        max_concurrent = 8
        tokens_per_minute = 1000
        """
    )
    web, nightly = read_keys(path)
    assert web == ApiKey(name="web", digest=digest_of("abc"))
    assert nightly == ApiKey(
        name="nightly",
        digest=digest_of("xyz"),
        priority=-1,
        max_priority=0,
        weight=0.5,
        max_concurrent=8,
        tokens_per_minute=1000,
    )
    assert (web.highest, nightly.highest) == (0, 0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "must hold tables"),
        ("key = 1", "must hold tables"),
        ("other = 1\n[[key]]\nname='a'\nsecret='b'", "must hold tables"),
        ("[[key]", "is not TOML"),
        ("[[key]]\nsecret='b'", "number 1, name: is missing"),
        ("[[key]]\nname='a'", "number 1, secret: give either"),
        ("[[key]]\nname='a'\nsecret='b'\nsha256='c'", "number 1, secret: give either"),
        ("[[key]]\nname='a'\nsha256='abcd'", "number 1, sha256: must be the 64"),
        ("[[key]]\nname='a'\nsha256=5", "number 1, sha256: must be the 64"),
        ("[[key]]\nname='a'\nsecret='b c'", "number 1, secret: must be 1 to 512"),
        ("[[key]]\nname='a'\nsecret=7", "number 1, secret: must be 1 to 512"),
        ("[[key]]\nname='a b'\nsecret='b'", "number 1, name: must be 1 to 64"),
        ("[[key]]\nname='a'\nsecret='b'\n[[key]]\nname='b'\nsecret='c'\nlimit=1", "number 2, limit: unknown"),
        ("[[key]]\nname='a'\nsecret='b'\n[[key]]\nname='a'\nsecret='c'", "two keys have the name 'a'"),
        ("[[key]]\nname='a'\nsecret='b'\n[[key]]\nname='b'\nsecret='b'", "the same secret"),
        ("[[key]]\nname='a'\nsecret='b'\nweight=0", "number 1, weight: must be in"),
        ("[[key]]\nname='a'\nsecret='b'\nweight=true", "number 1, weight: must be in"),
        ("[[key]]\nname='a'\nsecret='b'\nweight=nan", "number 1, weight: must be in"),
        ("[[key]]\nname='a'\nsecret='b'\npriority=0.5", "number 1, priority: must be an integer"),
        ("[[key]]\nname='a'\nsecret='b'\npriority=2\nmax_priority=1", "number 1, max_priority: must be"),
        ("[[key]]\nname='a'\nsecret='b'\nmax_concurrent=0", "number 1, max_concurrent: must be"),
        ("[[key]]\nname='a'\nsecret='b'\ntokens_per_minute='1'", "number 1, tokens_per_minute: must be"),
    ],
)
def test_a_bad_file_is_told_by_table_and_field(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="api_keys") as caught:
        read_keys(path)
    assert told in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(tmp_path / "none")


def test_keys_of_a_line() -> None:
    assert parse_keys("") == ()
    first, second, third = parse_keys("web:abc, xyz ,,ops:a:b")
    assert (first.name, first.digest) == ("web", digest_of("abc"))
    assert (second.name, second.digest) == ("key-2", digest_of("xyz"))
    assert (third.name, third.digest) == ("ops", digest_of("a:b"))


@pytest.mark.parametrize("text", ["web:", "a b:hunter2", "web:hun ter2", "x:hunter2,y:hunter2"])
def test_a_bad_line_does_not_give_its_secrets_away(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys(text)
    assert "hunter2" not in str(caught.value)
    assert "ter2" not in str(caught.value)


def test_secrets_are_compared_in_constant_time_with_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    real = hmac.compare_digest

    def watched(left: bytes, right: bytes) -> bool:
        compared.append(left)
        return real(left, right)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    keys = [key("a"), key("b"), key("c")]
    for name in ("a", "b", "c"):
        compared.clear()
        assert find(keys, f"secret-of-{name}".encode()) == key(name)
        assert compared == [item.digest for item in keys]
    assert find(keys, b"secret-of-d") is None
    assert find(keys, b"") is None


@given(st.lists(st.tuples(st.integers(0, 300), st.floats(0, 100)), max_size=40))
def test_over_time_the_bucket_gives_its_rate(spent: list[tuple[int, float]]) -> None:
    """Whoever waits as it is told to, and then takes any amount, has had at most the rate and what it holds."""
    bucket, now, taken = TokenBucket(60, 0.0), 0.0, 0
    for tokens, pause in spent:
        now += pause
        wait = bucket.wait(now)
        now += wait
        assert bucket.wait(now) == pytest.approx(0, abs=1e-6)
        assert taken <= 60 + now + 1e-6
        bucket.take(tokens, now)
        taken += tokens
        assert bucket.until_full(now) >= 0
    assert 0 <= bucket.left(now) <= 60


# The gate.


def test_without_keys_the_header_means_nothing() -> None:
    async def play(client: Client) -> None:
        for header in ({}, {"authorization": "Bearer x"}, {"authorization": "nonsense"}):
            assert (await client.post(COMPLETIONS, BODY, **header)).status_code == 200

    run(play)


def test_with_keys_nothing_goes_without_but_what_is_open(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shoal.requests")

    async def play(client: Client) -> None:
        for header in (
            {},
            {"authorization": "Bearer"},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic secret-of-a"},
            {"authorization": "secret-of-a"},
            {"authorization": "Bearer secret-of-a x"},
        ):
            for path in (COMPLETIONS, CHAT, "/tokenize", "/nowhere"):
                answer = await client.post(path, b"not even JSON", **header)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
            for path in ("/v1/models", "/metrics", "/version"):
                assert (await client.http.get(path, headers=header)).status_code == 401
        for path in ("/health", "/ready", "/docs", "/openapi.json"):
            assert (await client.http.get(path)).status_code == 200
        for name in ("a", "b"):
            assert (await client.post(COMPLETIONS, BODY, **bearer(name))).status_code == 200
        assert (await client.post(COMPLETIONS, BODY, authorization="bearer  secret-of-a")).status_code == 200
        answer = await client.http.get("/metrics", headers=bearer("a"))
        assert 'shoal_key_requests_total{key="a"} 2.0' in answer.text
        assert 'shoal_key_requests_total{key="b"} 1.0' in answer.text
        assert 'shoal_key_prompt_tokens_total{key="a"} 6.0' in answer.text
        assert 'shoal_key_generated_tokens_total{key="a"} 16.0' in answer.text
        assert 'shoal_http_errors_total{code="invalid_api_key"} 42.0' in answer.text

    run(play, keys=[key("a"), key("b")])
    lines = [record.fields for record in caplog.records if record.name == "shoal.requests"]  # type: ignore[attr-defined]
    assert {line.get("key") for line in lines} == {None, "a", "b"}
    assert {line.get("error") for line in lines if line["status"] == 401} == {"invalid_api_key"}
    assert "secret" not in str(lines)


def test_one_keys_priority_is_its_default_and_its_highest() -> None:
    async def play(client: Client) -> None:
        async def priority_of(name: str, **body: Any) -> int:
            seen: list[int] = []
            queue = client.served.client.queue

            def watched(requests: Any) -> Any:
                seen.extend(request.priority for request in requests)
                return queue(requests)

            client.served.client.queue = watched  # type: ignore[method-assign]
            answer = await client.post(COMPLETIONS, {**BODY, **body}, **bearer(name))
            client.served.client.queue = queue  # type: ignore[method-assign]
            assert answer.status_code == 200, answer.text
            return seen[0]

        assert await priority_of("low") == -2
        assert await priority_of("low", priority=-5) == -5
        assert await priority_of("high") == 3
        assert await priority_of("high", priority=7) == 7
        assert await priority_of("plain") == 0
        for name, wanted, highest in (("low", -1, -2), ("high", 8, 7), ("plain", 1, 0)):
            answer = await client.post(COMPLETIONS, {**BODY, "priority": wanted}, **bearer(name))
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "priority"
            assert str(highest) in answer.json()["error"]["message"]

    run(play, keys=[key("low", priority=-2), key("high", priority=3, max_priority=7), key("plain")])


def test_so_many_at_once_and_not_more() -> None:
    gate = threading.Event()

    async def play(client: Client) -> None:
        def ask(name: str, **more: Any) -> asyncio.Task[Any]:
            return asyncio.create_task(client.post(COMPLETIONS, {**BODY, **more}, **bearer(name)))

        held = [ask("two"), ask("two", stream=True)]
        while len(client.served.client._streams) < 2:
            await asyncio.sleep(0)
        third = await ask("two")
        assert third.status_code == 429
        assert third.json()["error"]["code"] == "too_many_concurrent_requests"
        assert third.json()["error"]["type"] == "rate_limit_error"
        assert int(third.headers["retry-after"]) >= 1
        other = ask("other")
        # What does not generate is not counted.
        assert (await client.http.get("/v1/models", headers=bearer("two"))).status_code == 200
        gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*held, other)] == [200] * 3
        assert (await ask("two")).status_code == 200
        # Requests that are refused or fail give their places back.
        for _ in range(5):
            assert (await client.post(COMPLETIONS, {"prompt": 5}, **bearer("two"))).status_code == 400
        assert [answer.status_code for answer in await asyncio.gather(ask("two"), ask("two"))] == [200] * 2

    run(play, gate=gate, keys=[key("two", max_concurrent=2), key("other")])


def test_so_many_tokens_a_minute_and_not_more() -> None:
    now = [1000.0]

    async def play(client: Client) -> None:
        async def ask(tokens: int) -> Any:
            return await client.post(COMPLETIONS, {"prompt": "abc", "max_tokens": tokens}, **bearer("a"))

        first = await ask(47)  # 50 with the prompt
        assert first.headers["x-ratelimit-limit-tokens"] == "120"
        assert first.headers["x-ratelimit-remaining-tokens"] == "70"
        assert first.headers["x-ratelimit-reset-tokens"] == "25.000s"
        assert (await ask(97)).status_code == 200  # 100: 30 more than there were
        refused = await ask(1)
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "tokens_per_minute_exceeded")
        wait = int(refused.headers["retry-after"])
        assert wait == 16  # 31 tokens at two a second
        now[0] += wait - 1
        assert (await ask(1)).status_code == 429
        now[0] += 1
        assert (await ask(1)).status_code == 200  # whoever waits so long is served
        now[0] += 3600
        assert (await ask(1)).headers["x-ratelimit-remaining-tokens"] == "116"

    run(play, keys=[key("a", tokens_per_minute=120)], clock=lambda: now[0])


def test_tokens_count_as_they_come() -> None:
    """A stream that runs for long takes from the bucket while it does, and what was broken off is paid for."""
    now = [0.0]
    gate = threading.Event()

    async def play(client: Client) -> None:
        body = {"prompt": "abc", "max_tokens": 400}
        task = asyncio.create_task(client.post(COMPLETIONS, {**body, "stream": True}, **bearer("a")))
        while client.served.engine.stats.generated_tokens < 200:
            gate.set()
            await asyncio.sleep(0)
            gate.clear()
        answer = await client.post(COMPLETIONS, BODY, **bearer("a"))
        assert answer.status_code == 429
        gate.set()
        assert (await task).status_code == 200
        now[0] += 400  # 303 tokens over, at one a second
        assert (await client.post(COMPLETIONS, BODY, **bearer("a"))).status_code == 200

    run(play, keys=[key("a", tokens_per_minute=60)], clock=lambda: now[0], gate=gate)


@pytest.mark.parametrize("share", [False, True])
def test_several_keys_do_not_see_each_others_cache(share: bool) -> None:
    async def play(client: Client) -> None:
        async def cached(name: str, **more: Any) -> int:
            body = {**HELLO, "messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 2, **more}
            answer = await client.post(CHAT, body, **bearer(name))
            found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        assert await cached("a") == 0
        mine = await cached("a")
        assert mine > 100
        assert await cached("b") == (mine if share else 0)
        assert await cached("b", cache_salt="s") == 0
        assert await cached("a", cache_salt="s") == (mine if share else 0)
        # What one key's salt and name spell, another's cannot.
        assert await cached("b", cache_salt="a\n") == 0
        assert await cached("a", cache_salt="\n") == 0
        assert await cached("b") == mine

    run(play, keys=[key("a"), key("b")], server=ServerConfig(share_cache=share), blocks=256)


def test_a_single_key_shares_with_itself_only_and_needs_no_salt() -> None:
    async def play(client: Client) -> None:
        body = {"messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 2}
        for expected in (False, True):
            answer = await client.post(CHAT, body, **bearer("a"))
            assert bool(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]) is expected

    run(play, keys=[key("a")])
