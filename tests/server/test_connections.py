"""Clients that are slow, huge or many, on real connections: each is cut off in time, and nobody else notices."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import pytest
from http_server import served_over_http

from shoal.config import ServerConfig
from shoal.server.connection import MAX_HEAD_BYTES
from shoal.server.run import allow_connections

QUICK = ServerConfig(body_timeout=1, write_timeout=1, keep_alive=1, max_body_bytes=1 << 16)
BODY = json.dumps({"prompt": "abc", "max_tokens": 4}).encode()


@contextmanager
def connected(address: str) -> Iterator[socket.socket]:
    parts = urlsplit(address)
    with socket.create_connection((parts.hostname, parts.port or 0), timeout=30) as client:
        yield client


def read_all(client: socket.socket) -> bytes:
    """Until the server closes or cuts the connection."""
    found = b""
    try:
        while part := client.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def head(length: int, path: str = "/v1/completions", **headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def answers(address: str) -> bool:
    """Whether somebody else is served."""
    answer = httpx.post(f"{address}/v1/completions", content=BODY, headers={"content-type": "application/json"})
    return answer.status_code == 200


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: lo"])
def test_a_head_that_does_not_come(sent: bytes) -> None:
    with served_over_http(server_config=QUICK) as address, connected(address) as client:
        began = time.monotonic()
        client.sendall(sent)
        assert read_all(client) == b""
        assert time.monotonic() - began >= 0.9
        assert answers(address)


def test_a_second_head_that_does_not_come() -> None:
    with served_over_http(server_config=QUICK) as address, connected(address) as client:
        client.sendall(head(len(BODY)) + BODY + b"POST /v1/comp")
        found = read_all(client)
        assert found.startswith(b"HTTP/1.1 200")
        assert found.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Big: " + b"a" * MAX_HEAD_BYTES,
        b"GET /" + b"a" * MAX_HEAD_BYTES,
        b"GET /health HTTP/1.1\r\n" + b"X-Small: a\r\n" * (MAX_HEAD_BYTES // 12 + 1),
    ],
)
def test_a_head_that_is_too_large(sent: bytes) -> None:
    with served_over_http(server_config=QUICK) as address, connected(address) as client:
        client.sendall(sent)
        found = read_all(client)
        assert found.startswith(b"HTTP/1.1 431 ")
        assert json.loads(found.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
        assert answers(address)


def test_a_body_that_does_not_come() -> None:
    with served_over_http(server_config=QUICK) as address, connected(address) as client:
        client.sendall(head(1000) + b'{"prompt"')
        found = read_all(client)
        assert found.startswith(b"HTTP/1.1 408 ")
        assert b'"body_timeout"' in found
        assert b"connection: close" in found.lower()
        assert answers(address)


@pytest.mark.parametrize("kind", ["chunks", "trailers", "a trailer"])
def test_a_body_without_an_end(kind: str) -> None:
    """However it is spelled, no more is read than a body may be long on the wire."""
    piece = {
        "chunks": b"1;extension=" + b"a" * 1000 + b"\r\n \r\n",
        "trailers": b"X-More: " + b"a" * 1000 + b"\r\n",
        "a trailer": b"a" * 1000,
    }[kind]
    begin = head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    begin += {"chunks": b"", "trailers": b"1\r\n \r\n0\r\n", "a trailer": b"1\r\n \r\n0\r\nX-More: "}[kind]
    with served_over_http(server_config=QUICK) as address, connected(address) as client:
        client.sendall(begin)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            client.sendall(piece * 100_000)
        assert answers(address)


def test_a_reader_that_does_not_read() -> None:
    """Its request is aborted, its memory freed; the engine never waited."""
    body = json.dumps({"prompt": "abc", "max_tokens": 3000, "stream": True, "n": 40, "logprobs": 5}).encode()
    with (
        served_over_http(server_config=QUICK, context_length=4000, blocks=12000) as address,
        connected(address) as client,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(head(len(body)) + body)
        assert client.recv(16).startswith(b"HTTP/1.1 200")
        assert answers(address)
        deadline = time.monotonic() + 60
        while metric(address, "shoal_completions_running") or metric(address, "shoal_completions_waiting"):
            assert time.monotonic() < deadline
        assert metric(address, "shoal_kv_blocks_used") == 0
        assert metric(address, 'shoal_http_requests_total{endpoint="/v1/completions",status="499"}') == 1
        found = read_all(client)  # what lay in the buffers; the rest never came
        assert not found.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_connection_that_was_left_open_is_closed() -> None:
    with served_over_http(server_config=QUICK) as address, connected(address) as client:
        client.sendall(head(len(BODY)) + BODY)
        assert b" 200 " in read_all(client)


def test_too_many_connections() -> None:
    config = ServerConfig(max_connections=3)
    with (
        served_over_http(server_config=config) as address,
        connected(address),
        connected(address) as second,
        connected(address),
    ):
        with connected(address) as fourth:
            found = read_all(fourth)
            assert found.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in found
            assert json.loads(found.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        second.sendall(head(len(BODY), connection="close") + BODY)
        assert b" 200 " in read_all(second)
        with connected(address) as fifth:  # takes the place that is free now
            fifth.sendall(head(len(BODY), connection="close") + BODY)
            assert b" 200 " in read_all(fifth)


def test_the_limit_on_open_files_is_raised_as_far_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4000))
    monkeypatch.setattr("resource.setrlimit", lambda _, wanted: limits.append(wanted))
    allow_connections(2000)
    allow_connections(100_000)
    allow_connections(500)
    assert limits == [(2128, 4000), (4000, 4000)]


# Who may ask.


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("evil.example", 421),
        ("evil.example:8000", 421),
        ("localhost.evil.example", 421),
    ],
)
def test_on_a_loopback_address_only_its_names_are_served(host: str, status: int) -> None:
    with served_over_http() as address:
        answer = httpx.get(f"{address}/v1/models", headers={"host": host})
        assert answer.status_code == status
        if status == 421:
            assert answer.json()["error"]["code"] == "unknown_host"


def test_a_request_that_names_no_host_is_served() -> None:
    with served_over_http() as address, connected(address) as client:
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("config", "status"),
    [
        (ServerConfig(allowed_hosts=("shoal.example",)), 200),
        (ServerConfig(allowed_hosts=("*",)), 200),
        (ServerConfig(allowed_hosts=("other.example",)), 421),
        (ServerConfig(host="0.0.0.0"), 200),  # meant to be reached from elsewhere, by whatever name
        (ServerConfig(host="0.0.0.0", allowed_hosts=("other.example",)), 421),
    ],
)
def test_other_names_are_allowed_on_request(config: ServerConfig, status: int) -> None:
    with served_over_http(server_config=config) as address:
        assert httpx.get(f"{address}/v1/models", headers={"host": "Shoal.example:80"}).status_code == status


def preflight(address: str, origin: str) -> httpx.Response:
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    return httpx.options(f"{address}/v1/chat/completions", headers={"origin": origin, **wanted})


def test_no_web_page_may_use_the_server_unless_it_is_named() -> None:
    page = "https://page.example"
    with served_over_http() as address:
        assert "access-control-allow-origin" not in preflight(address, page).headers
        assert "access-control-allow-origin" not in httpx.get(f"{address}/v1/models", headers={"origin": page}).headers
    with served_over_http(server_config=ServerConfig(cors_origins=(page,))) as address:
        found = preflight(address, page)
        assert found.status_code == 200
        assert found.headers["access-control-allow-origin"] == page
        assert "authorization" in found.headers["access-control-allow-headers"]
        answer = httpx.post(f"{address}/v1/completions", content=b"?", headers={"origin": page})
        assert answer.headers["access-control-allow-origin"] == page
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-origin" not in preflight(address, "https://other.example").headers


def metric(address: str, name: str) -> float:
    for line in httpx.get(f"{address}/metrics").text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.rpartition(" ")[2])
    return 0.0
