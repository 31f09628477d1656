"""A load without mercy on a real server: good requests among clients that leave, read slowly, send nonsense or are
cursed, in bursts.

Every good answer is compared with what the same request was answered before the load. The rest is counted, so that the
server's own counters can be held against it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from shoal.backends.null import Fault
from shoal.server.access.api_key import ApiKey, digest_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SECRETS = ("secret-a", "secret-b")
KEYS = (
    ApiKey(name="a", digest=digest_of(SECRETS[0])),
    ApiKey(name="b", digest=digest_of(SECRETS[1]), priority=-1, max_priority=1, max_concurrent=20),
)
# Bytes that make a prompt's request go wrong, each in its own way.
CURSES = {"raise": 1, "raise_step": 2, "error": 3, "nan": 4}
STALL = 5
FAULTS = (
    *(Fault(marker=byte, kind=kind, after=byte) for kind, byte in CURSES.items()),  # type: ignore[arg-type]
    Fault(marker=STALL, kind="stall", seconds=0.02, times=20),
)
_SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "x",
        "schema": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


@dataclass
class Tally:
    """What the clients saw. answered: by endpoint and status, of those who read everything; left: how many did not."""

    answered: Counter[tuple[str, int]] = field(default_factory=Counter)
    left: int = 0
    cursed: int = 0
    tokens: int = 0  # generated, in complete answers
    prompts: int = 0  # tokens of the prompts of those


class Soak:
    """Against one address, repeatable by seed."""

    def __init__(self, address: str, seed: int) -> None:
        self._address = address
        self._random = random.Random(seed)
        self._expected: dict[str, Any] = {}
        self._bodies = self._good_bodies()
        self.tally = Tally()

    async def learn(self) -> None:
        """Ask everything once, with nobody else there."""
        async with self._http() as http:
            for name in self._bodies:
                self._expected[name] = await self._ask(http, name, SECRETS[0], stream=False)

    async def burst(self, size: int) -> None:
        """So many clients at once, each of a random kind."""
        kinds = self._random.choices(
            ("whole", "stream", "leave", "leave_early", "half", "slow", "nonsense", "cursed"),
            weights=(6, 6, 3, 2, 1, 1, 3, 1),
            k=size,
        )
        async with self._http() as http, asyncio.TaskGroup() as clients:
            for kind in kinds:
                clients.create_task(self._client(http, kind))

    async def control(self) -> None:
        """Everything is answered as before, with nobody else there."""
        async with self._http() as http:
            for name, expected in self._expected.items():
                for secret in SECRETS:
                    assert await self._ask(http, name, secret, stream=True) == expected, name

    def _http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._address, timeout=60, limits=httpx.Limits(max_connections=200))

    def _good_bodies(self) -> dict[str, tuple[str, dict[str, Any]]]:
        found: dict[str, tuple[str, dict[str, Any]]] = {}
        for number in range(24):
            # Long common beginnings, so that prefixes are found and shared.
            prompt = "The beginning that many have. " * (number % 4) + f"Number {number}."
            more: dict[str, Any] = {"seed": number} if number % 3 else {"temperature": 0}
            if number % 5 == 0:
                more["n"] = 2
            if number % 4 == 0:
                more["logprobs"] = 2
            body = {"prompt": prompt, "max_tokens": 4 + 5 * (number % 9), "ignore_eos": True, **more}
            found[f"completion {number}"] = (COMPLETIONS, body)
        for number in range(8):
            body = {"messages": [{"role": "user", "content": f"Question {number}"}], "seed": 5, "max_tokens": 30}
            if number % 4 == 0:
                body["response_format"] = _SCHEMA
            found[f"chat {number}"] = (CHAT, body)
        return found

    async def _client(self, http: httpx.AsyncClient, kind: str) -> None:
        await asyncio.sleep(self._random.random() * 0.05)
        name = self._random.choice(list(self._bodies))
        secret = self._random.choice(SECRETS)
        if kind in ("whole", "stream"):
            found = await self._ask(http, name, secret, stream=kind == "stream")
            assert found in (None, self._expected[name]), name
        elif kind == "nonsense":
            await self._nonsense(http, secret)
        elif kind == "cursed":
            await self._cursed(http, secret)
        else:
            await self._deserter(kind, secret)

    async def _ask(self, http: httpx.AsyncClient, name: str, secret: str, *, stream: bool) -> Any:
        """The choices; None if there was no room for it."""
        path, body = self._bodies[name]
        if secret == SECRETS[1] and self._random.random() < 0.3:
            body = {**body, "priority": 1}
        body = {**body, **({"stream": True, "stream_options": {"include_usage": True}} if stream else {})}
        answer = await http.post(path, json=body, headers={"authorization": f"Bearer {secret}"})
        self.tally.answered[path, answer.status_code] += 1
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            return None
        assert answer.status_code == 200, answer.text
        if stream:
            *events, done = [line[6:] for line in answer.text.splitlines() if line]
            assert done == "[DONE]"
            choices, usage = _joined([json.loads(event) for event in events])
        else:
            choices, usage = _plain(answer.json())
        self.tally.tokens += usage["completion_tokens"]
        self.tally.prompts += usage["prompt_tokens"]
        return choices

    async def _cursed(self, http: httpx.AsyncClient, secret: str) -> None:
        stream = self._random.random() < 0.5
        curse = self._random.choice([*CURSES.values(), STALL])
        body = {"prompt": f"cursed {chr(curse)}", "max_tokens": 20, "ignore_eos": True, "stream": stream}
        answer = await http.post(COMPLETIONS, json=body, headers={"authorization": f"Bearer {secret}"})
        self.tally.answered[COMPLETIONS, answer.status_code] += 1
        if answer.status_code == 429 or curse == STALL:
            assert answer.status_code in (200, 429)
        elif stream and answer.status_code == 200:
            assert json.loads(answer.text.split("data: ")[-2])["error"]["code"] == "request_failed"
            self.tally.cursed += 1
        else:
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "request_failed"
            self.tally.cursed += 1

    async def _nonsense(self, http: httpx.AsyncClient, secret: str) -> None:
        choose = self._random
        status, content, headers = choose.choice(
            [
                (400, choose.randbytes(choose.randrange(1, 400)), {}),
                (400, b"{" * 300, {}),
                (400, b'{"prompt": "a", "prompt": "b"}', {}),
                (400, json.dumps({"prompt": "a", "temperature": choose.choice([-1, "x", 1e9, None, []])}).encode(), {}),
                (400, json.dumps({"prompt": [choose.randrange(2**60)]}).encode(), {}),
                (400, json.dumps({"prompt": "a" * 5000}).encode(), {}),
                (400, json.dumps({"prompt": "a", "best": 1}).encode(), {}),
                (401, b'{"prompt": "a"}', {"authorization": "Bearer nobody"}),
                (404, b'{"prompt": "a", "model": "another"}', {}),
                (413, b"[" + b"1," * (1 << 17), {}),
                (415, b'{"prompt": "a"}', {"content-type": "text/plain"}),
            ]
        )
        headers = {"content-type": "application/json", "authorization": f"Bearer {secret}", **headers}
        answer = await http.post(COMPLETIONS, content=content, headers=headers)
        self.tally.answered[COMPLETIONS, answer.status_code] += 1
        # A key that has too many requests already is told so first; a temperature of null is the default's.
        fits = answer.status_code in (status, 429) or (b"null" in content and answer.status_code == 200)
        assert fits, (status, answer.status_code, answer.text)

    async def _deserter(self, kind: str, secret: str) -> None:
        """Leaves: in the middle of the body, after it, in the middle of the answer, or after reading it slowly."""
        self.tally.left += 1
        parts = urlsplit(self._address)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        body = {
            "prompt": "leaves",
            "max_tokens": 300,
            "ignore_eos": True,
            "stream": True,
            "n": self._random.choice([1, 3]),
        }
        content = json.dumps(body).encode()
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {secret}\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        try:
            writer.write(head.encode() + (content[:20] if kind == "half" else content))
            await writer.drain()
            if kind == "leave":
                await reader.read(self._random.randrange(1, 5000))
            elif kind == "slow":
                for _ in range(20):
                    await reader.read(50)
                    await asyncio.sleep(0.02)
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()


def _plain(answer: dict[str, Any]) -> tuple[Any, Any]:
    found = {
        choice["index"]: [choice["text"] if "text" in choice else choice["message"]["content"], choice["finish_reason"]]
        for choice in answer["choices"]
    }
    return found, answer["usage"]


def _joined(events: list[dict[str, Any]]) -> tuple[Any, Any]:
    found: dict[int, list[Any]] = {}
    for event in events:
        for piece in event["choices"]:
            choice = found.setdefault(piece["index"], ["", None])
            choice[0] += (piece["text"] if "text" in piece else piece["delta"].get("content")) or ""
            choice[1] = piece["finish_reason"]
    return found, events[-1]["usage"]
