"""Tool calls over HTTP: asked for, streamed, answered."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server_support import CHAT, HELLO, Client, joined_chat, plain_chat, run

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ö 🦈", "days": 2}}</tool_call>'


def one_truth(client: Client, body: dict[str, Any]) -> Any:
    async def compare() -> dict[str, Any]:
        whole = await client.whole(CHAT, body)
        assert joined_chat(await client.stream(CHAT, body)) == plain_chat(whole)
        return whole

    return compare()


def test_a_call_that_the_model_makes_by_itself() -> None:
    text = f"Let me see. {CALL}"
    script = [*text.encode(), 256]

    async def play(client: Client) -> None:
        body = {**HELLO, "tools": [WEATHER, TIME], "temperature": 0, "max_tokens": 120}
        choice = (await one_truth(client, body))["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me see."
        (call,) = choice["message"]["tool_calls"]
        assert call["id"].startswith("call_")
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Ö 🦈", "days": 2}
        none = (await one_truth(client, {**body, "tool_choice": "none"}))["choices"][0]
        assert none["message"]["content"] == text
        assert none["finish_reason"] == "stop"
        cut = (await one_truth(client, {**body, "max_tokens": 30}))["choices"][0]
        assert cut["finish_reason"] == "length"
        assert cut["message"]["content"] == text[:30]

    run(play, script=script, context_length=4096, blocks=512)


def test_plain_text_beside_tools_is_an_answer() -> None:
    async def play(client: Client) -> None:
        body = {**HELLO, "tools": [WEATHER], "max_tokens": 50, "temperature": 0, "logprobs": True, "n": 2}
        answer = await one_truth(client, body)
        for choice in answer["choices"]:
            assert choice["message"]["content"] == "No tool. " * 5 + "No to"
            assert "tool_calls" not in choice["message"]
            assert len(choice["logprobs"]["content"]) == 50

    run(play, script="No tool. ", context_length=4096, blocks=512)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_be_made_fits_its_schema(seed: int, choice: Any) -> None:
    async def play(client: Client) -> None:
        body = {
            **HELLO,
            "tools": [WEATHER, TIME],
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "temperature": 1,
            "seed": seed,
        }
        found = (await one_truth(client, body))["choices"][0]
        assert found["finish_reason"] == "tool_calls"
        assert found["message"]["content"] is None
        (call,) = found["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        if choice != "required":
            assert call["function"]["name"] == "weather"
        if call["function"]["name"] == "weather":
            assert arguments.keys() == {"city", "days"}
            assert isinstance(arguments["days"], int)
        else:
            assert arguments == {}

    run(play, context_length=4096, blocks=512)


@pytest.mark.parametrize("seed", range(6))
def test_a_format_beside_tools_is_for_answers_that_are_no_calls(seed: int) -> None:
    answer_schema = {
        "type": "object",
        "properties": {"sky": {"enum": ["blue", "grey"]}},
        "required": ["sky"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "sky", "schema": answer_schema}}

    async def play(client: Client) -> None:
        body = {**HELLO, "tools": [WEATHER], "response_format": form, "temperature": 1, "seed": seed}
        found = (await one_truth(client, body))["choices"][0]
        message = found["message"]
        if found["finish_reason"] == "tool_calls":
            assert message["content"] is None
            assert json.loads(message["tool_calls"][0]["function"]["arguments"]).keys() == {"city", "days"}
            kinds.add("call")
        else:
            assert found["finish_reason"] == "stop"
            assert json.loads(message["content"])["sky"] in ("blue", "grey")
            kinds.add("answer")

    kinds: set[str] = set()
    run(play, context_length=4096, blocks=512)
    assert len(kinds) == 1


def test_a_model_may_choose_between_a_call_and_an_answer_in_a_format() -> None:
    """Whatever it begins, the grammar lets it end."""
    texts = {CALL.replace(">{", ">\n{").replace("}<", "}\n<"): "tool_calls", '{"sky":"blue"}': "stop"}
    form = {"type": "json_object"}
    for text, reason in texts.items():

        async def play(client: Client, reason: str = reason) -> None:
            body = {**HELLO, "tools": [WEATHER], "response_format": form, "temperature": 0, "max_tokens": 200}
            assert (await one_truth(client, body))["choices"][0]["finish_reason"] == reason

        run(play, script=[*text.encode(), 256], context_length=4096, blocks=512)


def test_past_calls_and_their_results_reach_the_prompt() -> None:
    arguments = json.dumps({"city": "Rome", "days": 1})
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny, 31 degrees"},
    ]

    async def play(client: Client) -> None:
        found = (
            await client.http.post(
                "/tokenize", json={"messages": messages, "tools": [WEATHER], "return_token_strs": True}
            )
        ).json()
        prompt = "".join(found["token_strs"])
        for part in ("The weather somewhere.", "<tool_call>", "Rome", "<tool_response>\nsunny, 31 degrees"):
            assert part in prompt
        answer = await client.whole(CHAT, {"messages": messages, "tools": [WEATHER], "max_tokens": 1})
        assert answer["usage"]["prompt_tokens"] == found["count"]

    run(play, context_length=4096, blocks=512)


def test_a_schema_that_cannot_be_enforced_is_the_tools() -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}

    async def play(client: Client) -> None:
        body = {**HELLO, "tools": [TIME, bad], "tool_choice": "required"}
        assert (await client.refused(CHAT, body))["param"] == "tools[1].function.parameters"

    run(play)
