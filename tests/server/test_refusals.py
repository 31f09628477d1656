"""What is wrong with a request is said at once, names its field, and harms nobody."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_support import CHAT, COMPLETIONS, HELLO, Client, run, serving

from shoal.config import EngineConfig, ServerConfig
from shoal.server.requests import REFUSED, ChatRequest, CompletionRequest

Case = tuple[dict[str, Any], str, str]  # a body, the field at fault, words of the message

PROMPT = {"prompt": "p"}
DEEP: dict[str, Any] = {"type": "object"}
for _ in range(35):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def response_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}, **more}}


BOTH: list[Case] = [
    ({"frobnicate": 1}, "frobnicate", "unknown field; known are"),
    ({"temperature": "hot"}, "temperature", "must be a valid number, got 'hot'"),
    ({"temperature": -0.1}, "temperature", "greater than or equal to 0, got -0.1"),
    ({"temperature": True}, "temperature", "must be a valid number, got true"),
    ({"temperature": 10**50}, "temperature", "an integer of more than 40 digits"),
    ({"temperature": 10**400}, "temperature", "must be a valid number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
    ({"top_k": -1}, "top_k", "greater than or equal to 0"),
    ({"top_k": 2.5}, "top_k", "must be a valid integer"),
    ({"min_p": 2}, "min_p", "less than or equal to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"presence_penalty": 1000}, "presence_penalty", "100"),
    ({"frequency_penalty": [1]}, "frequency_penalty", "got a list"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 129}, "n", "128"),
    ({"n": 20}, "n", "waiting queue of 16"),
    ({"seed": 2**70}, "seed", "less than or equal to"),
    ({"seed": "x"}, "seed", "valid integer"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "keys must be token ids, got 'x'"),
    ({"logit_bias": {"1": "a"}}, "logit_bias", "must be a number"),
    ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias", "token 1 stands there twice"),
    ({"logit_bias": {"999": 1}}, "logit_bias", "outside the vocabulary"),
    ({"logit_bias": [1]}, "logit_bias", "must be an object"),
    ({"logit_bias": {"1": 1e9}}, "logit_bias", "1000"),
    ({"stop": 5}, "stop", "must be a string or a list of strings"),
    ({"stop": [""]}, "stop", "must not be empty"),
    ({"stop": ["a"] * 65}, "stop", "at most 64"),
    ({"stop": ["a" * 2000]}, "stop", "at most 1024 characters"),
    ({"stop": [1]}, "stop", "strings only"),
    ({"stop_token_ids": [1, 2.5]}, "stop_token_ids[1]", "valid integer"),
    ({"stop_token_ids": [1000]}, "stop_token_ids", "outside the vocabulary"),
    ({"stop_token_ids": [1] * 300}, "stop_token_ids", "at most 256"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "more than max_tokens 3"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"max_tokens": 600}, "max_tokens", "context length 512"),
    ({"ignore_eos": 1}, "ignore_eos", "valid boolean"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "goes with stream only"),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other", "unknown field"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "False"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
    ({"response_format": "json"}, "response_format", "must be an object"),
    (response_format({"type": "nonsense"}), "response_format.json_schema.schema", ""),
    (response_format(DEEP), "response_format.json_schema.schema", "levels deep"),
    (response_format({"enum": ["x" * 200_000]}), "response_format.json_schema.schema", "at most 131072"),
    (response_format({"not": {}}), "response_format.json_schema.schema", "not"),
    (response_format({}, extra=1), "response_format.extra", "unknown field"),
    ({"regex": "("}, "regex", ""),
    ({"grammar": "start: nowhere"}, "grammar", ""),
    ({"regex": "a", "grammar": 'start: "a"'}, "grammar", "cannot be combined with regex"),
    ({"user": 5}, "user", "valid string"),
    ({"metadata": {"a": 1}}, "metadata.a", "valid string"),
    ({"deadline": 1}, "deadline", "--policy deadline"),
    ({"cache_salt": ""}, "cache_salt", "at least 1"),
    ({"prompt_cache_key": "k"}, "prompt_cache_key", "is not supported: equal prefixes are shared"),
]


@pytest.mark.parametrize(("path", "base", "cases"), [(CHAT, HELLO, BOTH), (COMPLETIONS, PROMPT, BOTH)])
def test_what_both_endpoints_refuse(path: str, base: dict[str, Any], cases: list[Case]) -> None:
    async def play(client: Client) -> None:
        for wrong, param, message in cases:
            for stream in (False, True):
                if stream and "stream" in wrong:
                    continue
                if stream and "stream_options" in wrong:
                    continue
                error = await client.refused(path, {**base, **wrong, **({"stream": True} if stream else {})})
                assert error["param"] == param, (wrong, error)
                assert error["type"] == "invalid_request_error"
                assert error["message"].startswith(f"{param}: ")
                assert message in error["message"], (wrong, error)
        assert (await client.whole(path, {**base, "max_tokens": 2}))["choices"]

    run(play, max_waiting=16)


ONLY_COMPLETIONS: list[Case] = [
    ({}, "prompt", "is missing"),
    ({"prompt": None}, "prompt", "must be a string"),
    ({"prompt": 5}, "prompt", "must be a string"),
    ({"prompt": ""}, "prompt", "is empty"),
    ({"prompt": []}, "prompt", "is empty; at least one prompt"),
    ({"prompt": [[]]}, "prompt[0]", "is empty"),
    ({"prompt": ["a", ""]}, "prompt[1]", "is empty"),
    ({"prompt": ["a", 1]}, "prompt[1]", "must be a string"),
    ({"prompt": [1, "a"]}, "prompt", "token ids"),
    ({"prompt": [1, 2.0]}, "prompt", "token ids"),
    ({"prompt": [1, True]}, "prompt", "token ids"),
    ({"prompt": [[1], [257]]}, "prompt[1]", "outside the vocabulary"),
    ({"prompt": [-1]}, "prompt", "outside the vocabulary"),
    ({"prompt": [10**30]}, "prompt", "outside the vocabulary"),
    ({"prompt": [10**30], "echo": True}, "prompt", "outside the vocabulary"),
    ({"prompt": {"text": "a"}}, "prompt", "must be a string"),
    ({"prompt": "a" * 600}, "prompt", "has 600 tokens, but the context length is 512"),
    ({"prompt": "a" * 512}, "prompt", "fills the context"),
    ({"prompt": "a" * 500_000}, "prompt", "more than 4096 tokens"),
    ({"prompt": ["a", "b" * 500_000]}, "prompt[1]", "more than 4096 tokens"),
    ({"prompt": "\ud800"}, "prompt", "lone surrogate"),
    ({"prompt": ["a"] * 17}, "prompt", "asks for 17 completions"),
    ({**PROMPT, "suffix": "s"}, "suffix", "is not supported"),
    ({**PROMPT, "best_of": 2, "n": 3}, "best_of", "less than n"),
    ({**PROMPT, "best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
    ({**PROMPT, "best_of": 20}, "best_of", "waiting queue of 16"),
    ({**PROMPT, "logprobs": 65}, "logprobs", "less than or equal to 64"),
    ({**PROMPT, "logprobs": True}, "logprobs", "valid integer"),
    ({**PROMPT, "echo": "yes"}, "echo", "valid boolean"),
    ({**PROMPT, "messages": []}, "messages", "unknown field"),
]
ONLY_CHAT: list[Case] = [
    ({}, "messages", "is missing"),
    ({"messages": "hi"}, "messages", "must be a list"),
    ({"messages": []}, "messages", "is empty"),
    ({"messages": ["hi"]}, "messages[0]", "must be an object"),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "non-empty string"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "must be a string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
        "only 'text'",
    ),
    ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages[0].x", "unknown field"),
    ({"messages": [{"role": "user", "content": "a" * 700}]}, "messages", "tokens, but the context length is 512"),
    ({"messages": [{"role": "user", "content": "a" * 500_000}]}, "messages", "more than 4096 tokens"),
    ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages", "lone surrogate"),
    ({**HELLO, "continue_final_message": True}, "continue_final_message", "must be the assistant's"),
    (
        {**HELLO, "continue_final_message": True, "add_generation_prompt": True},
        "add_generation_prompt",
        "must be off",
    ),
    ({**HELLO, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({**HELLO, "logprobs": 2}, "logprobs", "valid boolean"),
    ({**HELLO, "logprobs": True, "top_logprobs": 65}, "top_logprobs", "less than or equal to 64"),
    ({**HELLO, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "differs from max_tokens"),
    ({**HELLO, "max_completion_tokens": 600}, "max_completion_tokens", "context length 512"),
    ({**HELLO, "best_of": 2}, "best_of", "/v1/completions only"),
    ({**HELLO, "functions": []}, "functions", "use tools"),
    ({**HELLO, "store": True}, "store", "False"),
    ({**HELLO, "service_tier": "flex"}, "service_tier", "'auto' or 'default'"),
    ({**HELLO, "modalities": ["audio"]}, "modalities[0]", "'text'"),
    ({**HELLO, "tool_choice": "auto"}, "tool_choice", "goes with tools only"),
    ({**HELLO, "parallel_tool_calls": True}, "parallel_tool_calls", "goes with tools only"),
    ({**HELLO, "tools": {}}, "tools", "must be a list"),
    ({**HELLO, "tools": [5]}, "tools[0]", "must be an object"),
    ({**HELLO, "tools": [TOOL, TOOL]}, "tools[1].function.name", "twice"),
    ({**HELLO, "tools": [TOOL], "tool_choice": "maybe"}, "tool_choice", "must be none, auto, required"),
    ({**HELLO, "tools": [TOOL], "regex": "a"}, "regex", "leave no room for tool calls"),
    ({**HELLO, "tools": [TOOL], "tool_choice": "required", **response_format({})}, "response_format", "no room"),
    ({**HELLO, "prompt": "p"}, "prompt", "unknown field"),
]


@pytest.mark.parametrize(("path", "cases"), [(CHAT, ONLY_CHAT), (COMPLETIONS, ONLY_COMPLETIONS)])
def test_what_one_endpoint_refuses(path: str, cases: list[Case]) -> None:
    async def play(client: Client) -> None:
        for body, param, message in cases:
            error = await client.refused(path, body)
            assert error["param"] == param, (str(body)[:200], error)
            assert message in error["message"], (str(body)[:200], error)
            assert len(error["message"]) < 2000

    run(play, max_waiting=16)


def test_too_long_has_the_code_that_programs_look_for() -> None:
    async def play(client: Client) -> None:
        for body in ({"prompt": "a" * 600}, {"prompt": "a" * 500_000}, {"prompt": "a", "max_tokens": 600}):
            assert (await client.refused(COMPLETIONS, body))["code"] == "context_length_exceeded"

    run(play)


def test_every_field_that_others_have_is_refused_by_name_and_null_is_nothing() -> None:
    async def play(client: Client) -> None:
        for path, base, model in ((CHAT, HELLO, ChatRequest), (COMPLETIONS, PROMPT, CompletionRequest)):
            others = [name for name in REFUSED if name not in model.model_fields]
            assert others
            for name in others:
                error = await client.refused(path, {**base, name: 1})
                assert (error["param"], error["code"]) == (name, "unsupported_parameter")
            nothing = dict.fromkeys([*others, *(name for name in model.model_fields if name not in base)])
            assert (await client.whole(path, {**base, **nothing, "max_tokens": 1}))["choices"]
            await client.refused(path, {**base, "frobnicate": None})

    run(play)


BROKEN: list[tuple[bytes, str]] = [
    (b"", "the body is empty"),
    (b"  \n", "the body is empty"),
    (b"{", "not JSON"),
    (b"{'a': 1}", "not JSON"),
    (b'{"prompt": "p"} x', "not JSON"),
    (b'{"prompt": "\xff"}', "not UTF-8: byte 12"),
    (b'{"temperature": NaN, "prompt": "p"}', "NaN is not JSON"),
    (b'{"temperature": -Infinity, "prompt": "p"}', "-Infinity is not JSON"),
    (b'{"temperature": 1e999, "prompt": "p"}', "1e999 is too large"),
    (b'{"n": ' + b"9" * 5000 + b"}", "too many digits"),
    (b'{"n": 1, "n": 2}', "'n' stands twice"),
    (b"[" * 50_000 + b"]" * 50_000, "levels deep"),
    (b"[" + b"[]," * 100_000 + b"[]]", "more than 100000 opening brackets"),
    (b'{"prompt": "' + b"," * 1_000_001 + b'"}', "more than 1000000 commas"),
    (b'{"metadata": ' + b'{"a":' * 150 + b"1" + b"}" * 151, "levels deep"),
    (b"[]", "must be a JSON object, got a list"),
    (b'"text"', "must be a JSON object, got a string"),
    (b"null", "must be a JSON object, got null"),
    (b"7", "must be a JSON object, got a number"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
def test_broken_bodies(path: str) -> None:
    async def play(client: Client) -> None:
        for body, message in BROKEN:
            error = await client.refused(path, body)
            assert message in error["message"]
            assert error["code"] == "invalid_json"

    run(play, server=ServerConfig())


def test_a_body_that_is_too_large_or_not_json() -> None:
    async def chunks() -> Any:
        for _ in range(10):
            yield b" " * 1000

    async def play(client: Client) -> None:
        error = await client.refused(COMPLETIONS, b" " * 5000, 413)
        assert error["code"] == "body_too_large"
        assert "4096 bytes" in error["message"]
        answer = await client.http.post(COMPLETIONS, content=chunks(), headers={"content-type": "application/json"})
        assert answer.status_code == 413
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            answer = await client.post(COMPLETIONS, PROMPT, **{"content-type": kind})
            assert answer.status_code == 415
            assert "Content-Type: application/json" in answer.json()["error"]["message"]
        answer = await client.post(
            COMPLETIONS, {**PROMPT, "max_tokens": 1}, **{"content-type": "Application/JSON; charset=utf-8"}
        )
        assert answer.status_code == 200

    run(play, server=ServerConfig(max_body_bytes=4096))


def test_another_model() -> None:
    async def play(client: Client) -> None:
        for path, body in (
            (CHAT, HELLO),
            (COMPLETIONS, PROMPT),
            ("/tokenize", PROMPT),
            ("/detokenize", {"tokens": [1]}),
        ):
            error = await client.refused(path, {**body, "model": "gpt-5"}, 404)
            assert (error["param"], error["code"]) == ("model", "model_not_found")
            assert "'fake'" in error["message"]
        assert (await client.whole(CHAT, {**HELLO, "model": "fake", "max_tokens": 1}))["model"] == "fake"

    run(play)


def test_a_model_without_a_template_has_no_chat() -> None:
    async def play(client: Client) -> None:
        error = await client.refused(CHAT, HELLO)
        assert "use /v1/completions" in error["message"]

    run(play, template=False)


def test_no_such_place_and_no_such_method() -> None:
    async def play(client: Client) -> None:
        for method, path, status, code in (
            ("GET", "/nothing", 404, "unknown_url"),
            ("POST", "/v1/embeddings", 404, "unknown_url"),
            ("GET", COMPLETIONS, 405, "method_not_allowed"),
            ("DELETE", "/health", 405, "method_not_allowed"),
        ):
            answer = await client.http.request(method, path)
            assert answer.status_code == status
            assert answer.json()["error"]["code"] == code
            assert answer.headers["x-request-id"]
        assert (await client.http.get(COMPLETIONS)).headers["allow"] == "POST"

    run(play)


def test_a_queue_that_is_full() -> None:
    """All or nothing: of a list that does not fit, none is queued."""
    gate = threading.Event()

    async def main() -> None:
        async with serving(gate=gate, max_num_seqs=1, max_waiting=4) as client:
            body = {"prompt": ["a", "b", "c"], "max_tokens": 2}
            first = asyncio.ensure_future(client.whole(COMPLETIONS, body))
            while not client.served.client._streams:
                await asyncio.sleep(0)
            answer = await client.post(COMPLETIONS, body)
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
            gate.set()
            assert len((await first)["choices"]) == 3
            assert len((await client.whole(COMPLETIONS, body))["choices"]) == 3

    asyncio.run(main())


def test_priority_and_deadline_are_taken_where_they_mean_something() -> None:
    async def by_priority(client: Client) -> None:
        assert (await client.whole(COMPLETIONS, {**PROMPT, "priority": 5}))["choices"]

    async def by_deadline(client: Client) -> None:
        assert (await client.whole(COMPLETIONS, {**PROMPT, "deadline": 5.5}))["choices"]

    async def by_arrival(client: Client) -> None:
        answer = await client.post(COMPLETIONS, {**PROMPT, "priority": 1})
        assert answer.status_code == 400
        assert (answer.json()["error"]["param"], "--policy priority" in answer.text) == ("priority", True)

    run(by_priority)
    run(by_arrival, config=EngineConfig(policy="fcfs"))
    run(by_deadline, config=EngineConfig(policy="deadline"))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_no_value_of_any_field_is_a_bug(data: st.DataObject) -> None:
    """Every field gets any JSON at all: an answer or a refusal that names it, never a 500."""
    path, model, base = data.draw(
        st.sampled_from([(CHAT, ChatRequest, HELLO), (COMPLETIONS, CompletionRequest, PROMPT)])
    )
    bodies = [{**base, "max_tokens": 2, name: data.draw(JSON_VALUES)} for name in sorted(model.model_fields)]

    async def play(client: Client) -> None:
        answers = await asyncio.gather(*(client.post(path, json.dumps(body).encode()) for body in bodies))
        for body, answer in zip(bodies, answers, strict=True):
            assert answer.status_code in (200, 400, 404), (body, answer.text)
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]

    run(play)


def test_errors_are_utf8_whatever_they_quote() -> None:
    async def play(client: Client) -> None:
        for body in (
            b'{"\\ud800": 1, "prompt": "p"}',
            b'{"model": "\\udc00", "prompt": "p"}',
            b'{"user": "\\ud800", "stop": 1}',
        ):
            answer: httpx.Response = await client.post(COMPLETIONS, body)
            assert answer.status_code in (400, 404)
            answer.content.decode("utf-8")

    run(play)
