"""The official clients, and curl, against the served default model."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from served import ServerProcess

from shoal import LLM, SamplingParams

pytestmark = pytest.mark.model
JS = Path(__file__).parent / "js"
MESSAGES: list[Any] = [{"role": "user", "content": "Name three rivers."}]
HOW: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24}
PROMPT: dict[str, Any] = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
CITY: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(model_path, tmp_path_factory.mktemp("server"), "--served-name", "smollm2")
    yield process
    assert process.stop() == 0


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def by_library(model_path: Path) -> dict[str, Any]:
    """What the Python API answers to the same."""
    with LLM(model_path) as llm:
        chat = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=24))
        completion = llm.generate(PROMPT["prompt"], SamplingParams(temperature=0, max_tokens=8))[0]
    return {
        "chat": chat.text,
        "completion": completion.text,
        "usage": (chat.usage.prompt_tokens, chat.usage.completion_tokens),
    }


def test_chat(client: openai.OpenAI, by_library: dict[str, Any]) -> None:
    answer = client.chat.completions.create(model="smollm2", **HOW)
    assert answer.choices[0].message.content == by_library["chat"]
    assert answer._request_id
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == by_library["usage"]
    stream = client.chat.completions.create(model="smollm2", **HOW, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == by_library["chat"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


def test_completions(client: openai.OpenAI, by_library: dict[str, Any]) -> None:
    answer = client.completions.create(model="smollm2", **PROMPT, logprobs=2, echo=True)
    assert answer.choices[0].text == PROMPT["prompt"] + by_library["completion"]
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert "".join(found.tokens) == answer.choices[0].text
    assert found.token_logprobs[0] is None
    stream = client.completions.create(model="smollm2", **PROMPT, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == by_library["completion"]


def test_logprobs_and_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=MESSAGES,
        seed=5,
        n=3,
        max_completion_tokens=6,
        logprobs=True,
        top_logprobs=2,
        user="u",
        metadata={"k": "v"},
        logit_bias={"198": -100},
        stop=["\n"],
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None
        for entry in choice.logprobs.content or []:
            assert bytes(entry.bytes or []).decode("utf-8", "replace") == entry.token
            assert entry.logprob <= 0
            assert len(entry.top_logprobs) == 2


def test_structured_output(client: openai.OpenAI) -> None:
    class Person(BaseModel):
        name: str
        age: int

    answer = client.chat.completions.parse(
        model="smollm2",
        messages=[{"role": "user", "content": "Invent a person named Ada, 36 years old, as JSON."}],
        response_format=Person,
        temperature=0,
        max_tokens=200,
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_tools(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "smollm2",
        "tools": [CITY],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 100,
    }
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
    with client.chat.completions.stream(**asked, messages=messages) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    message = client.chat.completions.create(**asked, messages=messages).choices[0].message
    (call,) = message.tool_calls or []
    (same,) = streamed.choices[0].message.tool_calls or []
    assert streamed.choices[0].finish_reason == "tool_calls"
    assert (call.function.name, call.function.arguments) == (same.function.name, same.function.arguments)
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments).keys() == {"city"}
    # As programs do it: the message goes back as it came.
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    done = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=4)
    assert done.choices[0].message.content is not None


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").owned_by == "shoal"


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="smollm2", **{**HOW, "temperature": -1})
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    assert bad.value.request_id
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="smollm2", prompt="word " * 20_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="smollm2", messages=[], stream=True)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError, match="frobnicate"):
        client.chat.completions.create(model="smollm2", **HOW, extra_body={"frobnicate": 1})


def test_many_at_once_say_what_they_say_alone(server: ServerProcess) -> None:
    topics = ["the sea", "Rome", "bread", "mountains", "a clock", "winter", "ink", "bees"]

    async def play() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", timeout=120) as client:

            async def ask(topic: str) -> str | None:
                answer = await client.chat.completions.create(
                    model="smollm2",
                    messages=[{"role": "user", "content": f"Tell me about {topic}."}],
                    temperature=0.8,
                    seed=7,
                    max_tokens=20,
                    extra_body={"timings": True},
                )
                batches.append(answer.model_extra["timings"]["mean_batch"])  # type: ignore[index]
                return answer.choices[0].message.content

            batches: list[float] = []
            alone = [await ask(topic) for topic in topics]
            assert set(batches) == {1.0}
            batches.clear()
            assert await asyncio.gather(*(ask(topic) for topic in topics)) == alone
            assert max(batches) > 2

    asyncio.run(play())


def test_a_client_that_hangs_up_frees_its_place(server: ServerProcess) -> None:
    body = {"messages": MESSAGES, "stream": True, "max_tokens": 8000, "ignore_eos": True}
    with httpx.Client(timeout=60) as http:
        with http.stream("POST", f"{server.address}/v1/chat/completions", json=body) as answer:
            next(answer.iter_lines())
        while True:
            done = http.post(f"{server.address}/v1/chat/completions", json={**HOW, "max_tokens": 4, "timings": True})
            if done.json()["timings"]["mean_batch"] == 1:
                break


def test_the_curl_of_the_readme(server: ServerProcess) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^(curl .*?[^\\])$", readme, re.MULTILINE | re.DOTALL)
    assert found is not None
    command = found[1].replace("http://127.0.0.1:8000", server.address)
    assert server.address in command
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def js(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the JavaScript client installed."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("js")
    for name in ("package.json", "client.mjs"):
        shutil.copy(JS / name, folder)
    install = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_javascript_client(server: ServerProcess, js: Path, by_library: dict[str, Any]) -> None:
    done = subprocess.run(
        ["node", "client.mjs", f"{server.address}/v1", "smollm2"],
        cwd=js,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["request_id"].startswith("req_")
    assert found["chat"]["text"] == found["chat_stream"]["text"] == by_library["chat"]
    assert found["chat"]["usage"]["completion_tokens"] == found["chat_stream"]["usage"]["completion_tokens"]
    assert found["completion"] == found["completion_stream"]["text"] == by_library["completion"]
    assert found["models"] == ["smollm2"]
    assert found["model"] == "smollm2"
    assert found["call"]["name"] == "weather"
    assert json.loads(found["call"]["arguments"]).keys() == {"city"}
    assert found["call_finish"] == "tool_calls"
    bad = {"kind": "BadRequestError", "status": 400, "param": "temperature", "code": "invalid_value"}
    assert found["bad_field"] == bad
    assert found["bad_model"] == {"kind": "NotFoundError", "status": 404, "param": "model", "code": "model_not_found"}
    assert found["bad_stream"]["status"] == 400


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_runs_end(model_path: Path, tmp_path: Path, number: int) -> None:
    with ServerProcess(model_path, tmp_path) as server, httpx.Client(timeout=60) as http:
        body = {**HOW, "max_tokens": 200, "ignore_eos": True, "stream": True}
        with http.stream("POST", f"{server.address}/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(number)
            while (ready := http.get(f"{server.address}/ready")).status_code == 200:
                continue
            assert ready.json()["error"]["code"] == "not_ready"
            refused = http.post(f"{server.address}/v1/chat/completions", json=HOW)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert http.get(f"{server.address}/health").status_code == 200
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert len(rest) > 50
        assert "error" not in json.loads(rest[-2].removeprefix("data: "))
        assert server.process.wait(60) == 0


def test_what_takes_longer_than_the_grace_period_ends_with_an_error(model_path: Path, tmp_path: Path) -> None:
    with ServerProcess(model_path, tmp_path, "--grace", "1") as server, httpx.Client(timeout=60) as http:
        body = {**HOW, "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with http.stream("POST", f"{server.address}/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            *_, last, done = [line for line in lines if line]
        assert done == "data: [DONE]"
        assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert server.process.wait(60) == 0


def test_a_second_signal_ends_it_at_once(model_path: Path, tmp_path: Path) -> None:
    with ServerProcess(model_path, tmp_path) as server, httpx.Client(timeout=60) as http:
        body = {**HOW, "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with http.stream("POST", f"{server.address}/v1/chat/completions", json=body) as answer:
            next(answer.iter_lines())
            server.process.send_signal(signal.SIGTERM)
            server.process.send_signal(signal.SIGINT)
            assert server.stop(signal.SIGINT) == 0
