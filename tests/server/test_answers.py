"""One truth: whole answers, joined streams, prompts in lists, choices of n and the Python API agree to the byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engine_support import EOS, byte_tokenizer, make_loaded
from hypothesis import given, settings
from hypothesis import strategies as st
from server_support import (
    CHAT,
    COMPLETIONS,
    HELLO,
    NAME,
    NOW,
    Client,
    joined_chat,
    joined_completion,
    plain_chat,
    run,
)

from shoal import LLM, SamplingParams

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 12},
    {"temperature": 1.0, "seed": 3, "max_tokens": 30, "logprobs": 2},
    {"temperature": 0.7, "seed": 4, "top_p": 0.9, "n": 3, "max_tokens": 9, "logprobs": 0},
    {"temperature": 1.0, "seed": 5, "stop": ["a", "bc"], "max_tokens": 200, "min_tokens": 3},
    {"temperature": 1.0, "seed": 6, "logit_bias": {"65": 5}, "presence_penalty": 0.5, "max_tokens": 8},
    {"temperature": 1.0, "seed": 7, "max_tokens": 20, "echo": True, "logprobs": 3, "n": 2},
    {"temperature": 1.0, "seed": 8, "max_tokens": 0, "echo": True, "logprobs": 1},
    {"temperature": 1.0, "seed": 8, "max_tokens": 0, "echo": True},
    {"temperature": 1.0, "seed": 9, "max_tokens": 40, "regex": "[a-z ]{3,9}[.!]"},
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_completion_is_the_same_whole_streamed_and_in_a_list(sampling: dict[str, Any]) -> None:
    prompts = ["Once upon a time", "Zwölf Boxkämpfer jagen 🦈", "x"]

    async def play(client: Client) -> None:
        alone = [await client.whole(COMPLETIONS, {"prompt": prompt, **sampling}) for prompt in prompts]
        together = await client.whole(COMPLETIONS, {"prompt": prompts, **sampling})
        streamed = joined_completion(await client.stream(COMPLETIONS, {"prompt": prompts, **sampling}))
        single = [choice for answer in alone for choice in answer["choices"]]
        assert [choice["index"] for choice in together["choices"]] == list(range(len(single)))
        for index, choice in enumerate(together["choices"]):
            assert {**choice, "index": 0} == {**single[index], "index": 0}
            assert streamed[index] == choice
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert together["usage"][name] == sum(answer["usage"][name] for answer in alone)

    run(play)


@pytest.mark.parametrize("sampling", [item for item in SAMPLINGS if "echo" not in item])
def test_a_chat_answer_is_the_same_whole_and_streamed(sampling: dict[str, Any]) -> None:
    body = {**HELLO, **sampling}
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}

    async def play(client: Client) -> None:
        answer = await client.whole(CHAT, body)
        assert joined_chat(await client.stream(CHAT, body)) == plain_chat(answer)

    run(play)


@pytest.mark.parametrize("sampling", SAMPLINGS[:5])
def test_the_python_api_says_the_same(sampling: dict[str, Any]) -> None:
    given_bias = {int(key): value for key, value in sampling.get("logit_bias", {}).items()}
    params = SamplingParams(**{**sampling, "logit_bias": given_bias})
    with LLM.from_loaded(make_loaded()) as llm:
        output = llm.generate("Once upon a time", params)[0]

    async def play(client: Client) -> None:
        answer = await client.whole(COMPLETIONS, {"prompt": "Once upon a time", **sampling})
        for choice, completion in zip(answer["choices"], output.completions, strict=True):
            assert choice["text"] == completion.text
            assert choice["finish_reason"] == completion.finish_reason
            if params.logprobs is not None:
                values = [entry.logprob for entry in completion.logprobs]
                assert choice["logprobs"]["token_logprobs"] == values
        usage = answer["usage"]
        assert usage["prompt_tokens"] == output.usage.prompt_tokens
        assert usage["completion_tokens"] == output.usage.completion_tokens
        assert usage["prompt_tokens_details"]["cached_tokens"] == output.usage.cached_tokens

    run(play)


@settings(max_examples=15, deadline=None)
@given(
    text=st.text(max_size=30),
    stop=st.lists(st.text(min_size=1, max_size=2), max_size=2),
    n=st.integers(1, 3),
)
def test_any_text_at_all(text: str, stop: list[str], n: int) -> None:
    """The model types ``text`` in bytes, which are half characters most of the time."""
    data = text.encode() or b"?"

    async def play(client: Client) -> None:
        body = {"prompt": "p", "max_tokens": len(data), "stop": stop, "n": n, "logprobs": 1, "echo": True}
        answer = await client.whole(COMPLETIONS, body)
        assert joined_completion(await client.stream(COMPLETIONS, body)) == {
            choice["index"]: choice for choice in answer["choices"]
        }
        expected = data.decode()
        cut = min((found for item in stop if (found := expected.find(item)) >= 0), default=None)
        for choice in answer["choices"]:
            if not stop or cut is None:
                assert choice["text"] == "p" + expected
            else:
                assert ("p" + expected).startswith(choice["text"])
                assert choice["finish_reason"] == "stop"

    run(play, script=list(data))


def test_the_envelope() -> None:
    async def play(client: Client) -> None:
        answer = await client.whole(CHAT, {**HELLO, "max_tokens": 2})
        assert answer["id"].startswith("chatcmpl-")
        assert (answer["created"], answer["model"]) == (NOW, NAME)
        assert answer["system_fingerprint"] == client.served.fingerprint
        assert "timings" not in answer
        objects = await client.stream(COMPLETIONS, {"prompt": "a", "max_tokens": 2})
        assert len({item["id"] for item in objects}) == 1
        assert objects[0]["id"].startswith("cmpl-")
        assert all("usage" not in item and item["choices"] for item in objects)

    run(play)


def test_a_chat_stream_begins_with_the_role_and_ends_with_the_reason() -> None:
    async def play(client: Client) -> None:
        objects = await client.stream(CHAT, {**HELLO, "max_tokens": 3, "n": 2})
        first = [item["choices"][0] for item in objects[:2]]
        assert [choice["delta"] for choice in first] == [{"role": "assistant", "content": ""}] * 2
        assert [choice["index"] for choice in first] == [0, 1]
        last = [item["choices"][0] for item in objects if item["choices"][0]["finish_reason"]]
        assert [choice["delta"] for choice in last] == [{}, {}]

    run(play)


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (COMPLETIONS, {"prompt": ["a", "b"]})])
def test_usage_ends_a_stream_that_asks_for_it(path: str, body: dict[str, Any]) -> None:
    async def play(client: Client) -> None:
        asked = {**body, "max_tokens": 5, "n": 2, "stream_options": {"include_usage": True}}
        objects = await client.stream(path, asked)
        whole = await client.whole(path, {**body, "max_tokens": 5, "n": 2})
        assert all(item["usage"] is None for item in objects[:-1])
        assert objects[-1]["choices"] == []
        assert objects[-1]["usage"] | {"prompt_tokens_details": None} == whole["usage"] | {
            "prompt_tokens_details": None
        }

    run(play)


def test_usage_counts_the_prompt_once_and_every_choice() -> None:
    async def play(client: Client) -> None:
        answer = await client.whole(COMPLETIONS, {"prompt": ["abcd", "ef"], "n": 3, "max_tokens": 7})
        assert answer["usage"] == {
            "prompt_tokens": 6,
            "completion_tokens": 2 * 3 * 7,
            "total_tokens": 6 + 42,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        long = "0123456789" * 5
        await client.whole(COMPLETIONS, {"prompt": long, "max_tokens": 1})
        again = await client.whole(COMPLETIONS, {"prompt": [long, long], "max_tokens": 1})
        assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 2 * 48}

    run(play)


@pytest.mark.parametrize("stream", [False, True])
def test_timings_when_asked(stream: bool) -> None:
    async def play(client: Client) -> None:
        body = {"prompt": ["abc", "d"], "max_tokens": 9, "timings": True}
        if stream:
            objects = await client.stream(COMPLETIONS, body)
            assert not any("timings" in item for item in objects[:-1])
            assert objects[-1]["choices"] == []
            timings = objects[-1]["timings"]
        else:
            timings = (await client.whole(COMPLETIONS, body))["timings"]
        parts = timings["queue_s"] + timings["prefill_s"] + timings["decode_s"]
        assert parts == pytest.approx(timings["total_s"])
        assert timings["ttft_s"] == pytest.approx(timings["queue_s"] + timings["prefill_s"])
        assert 1 <= timings["mean_batch"] <= 2
        assert 0 < timings["compute_s"] <= timings["total_s"]

    run(play)


def test_no_tokens_asked_for() -> None:
    async def play(client: Client) -> None:
        answer = await client.whole(COMPLETIONS, {"prompt": "abc", "max_tokens": 0, "timings": True})
        assert answer["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}]
        assert answer["usage"]["completion_tokens"] == 0
        assert answer["timings"]["ttft_s"] is None
        objects = await client.stream(CHAT, {**HELLO, "max_tokens": 0})
        assert joined_chat(objects)[0]["finish_reason"] == "length"

    run(play)


def test_a_completion_has_sixteen_tokens_unless_more_are_asked_for() -> None:
    async def play(client: Client) -> None:
        answer = await client.whole(COMPLETIONS, {"prompt": "a"})
        assert answer["usage"]["completion_tokens"] == 16
        answer = await client.whole(COMPLETIONS, {"prompt": "a" * 505})
        assert answer["usage"]["completion_tokens"] == 7
        answer = await client.whole(COMPLETIONS, {"prompt": "a", "min_tokens": 20})
        assert answer["usage"]["completion_tokens"] == 20
        answer = await client.whole(CHAT, {**HELLO, "logit_bias": None})
        assert answer["usage"]["total_tokens"] == 512

    run(play)


def test_echo_gives_the_prompt_back_with_its_logprobs() -> None:
    prompt = "naïve 🦈"
    data = list(prompt.encode())

    async def play(client: Client) -> None:
        for given_prompt in (prompt, data):
            body = {"prompt": given_prompt, "echo": True, "logprobs": 1, "max_tokens": 4}
            choice = (await client.whole(COMPLETIONS, body))["choices"][0]
            assert choice["text"] == prompt + "abcd"
            found = choice["logprobs"]
            assert len(found["tokens"]) == len(data) + 4
            assert found["tokens"][:2] == ["n", "a"]
            assert found["tokens"][2:4] == ["bytes:\\xc3", "bytes:\\xaf"]
            assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
            assert all(value < 0 for value in found["token_logprobs"][1:])
            assert found["text_offset"] == [0, 1, 2, 2, 3, 4, 5, 6, 6, 6, 6, 7, 8, 9, 10]

    run(play, script="abcd")


def test_special_tokens_in_a_prompt_are_echoed_as_they_are_spelled() -> None:
    async def play(client: Client) -> None:
        body = {"prompt": [65, EOS, 66], "echo": True, "logprobs": 0, "max_tokens": 1}
        choice = (await client.whole(COMPLETIONS, body))["choices"][0]
        assert choice["text"] == "A<|end|>Bx"
        assert choice["logprobs"]["tokens"] == ["A", "<|end|>", "B", "x"]
        assert choice["logprobs"]["text_offset"] == [0, 1, 8, 9]

    run(play, script="x")


def test_there_is_an_entry_for_every_token_that_is_counted() -> None:
    script = [*b"ab", EOS]

    async def play(client: Client) -> None:
        answer = await client.whole(CHAT, {**HELLO, "logprobs": True, "top_logprobs": 2})
        entries = answer["choices"][0]["logprobs"]["content"]
        assert answer["choices"][0]["message"]["content"] == "ab"
        assert [entry["token"] for entry in entries] == ["a", "b", "<|end|>"]
        assert [entry["bytes"] for entry in entries] == [[97], [98], list(b"<|end|>")]
        assert len(entries) == answer["usage"]["completion_tokens"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
        cut = await client.whole(COMPLETIONS, {"prompt": "p", "stop": "b", "logprobs": 0})
        assert cut["choices"][0]["text"] == "a"
        assert cut["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
        assert cut["choices"][0]["logprobs"]["top_logprobs"][0].keys() == {"a"}

    run(play, script=script)


def test_half_characters_come_as_bytes() -> None:
    async def play(client: Client) -> None:
        answer = await client.whole(CHAT, {**HELLO, "max_tokens": 4, "logprobs": True})
        choice = answer["choices"][0]
        assert choice["message"]["content"] == "🦈"
        assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[byte] for byte in "🦈".encode()]
        cut = await client.whole(CHAT, {**HELLO, "max_tokens": 3})
        assert cut["choices"][0]["message"]["content"] == "\ufffd"

    run(play, script=list("🦈".encode()))


def test_best_of_returns_the_most_likely_first() -> None:
    async def play(client: Client) -> None:
        body = {"prompt": "abc", "temperature": 1.0, "seed": 1, "max_tokens": 6}
        every = await client.whole(COMPLETIONS, {**body, "n": 6, "logprobs": 0})
        best = await client.whole(COMPLETIONS, {**body, "n": 2, "best_of": 6})
        ranked = sorted(
            every["choices"], key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]) / 6, reverse=False
        )
        assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in ranked[:2]]
        assert [choice["index"] for choice in best["choices"]] == [0, 1]
        assert all(choice["logprobs"] is None for choice in best["choices"])
        assert best["usage"]["completion_tokens"] == 36
        same = await client.stream(COMPLETIONS, {**body, "n": 6, "best_of": 6})
        assert [joined_completion(same)[index]["text"] for index in range(6)] == [
            choice["text"] for choice in every["choices"]
        ]

    run(play)


def test_a_prefilled_answer_is_gone_on_with() -> None:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two"}]

    async def play(client: Client) -> None:
        body = {"messages": messages, "continue_final_message": True, "return_token_strs": True}
        found = (await client.http.post("/tokenize", json=body)).json()
        assert "".join(found["token_strs"]) == "user: Count.\nassistant: One, two"
        answer = await client.whole(CHAT, {"messages": messages, "continue_final_message": True, "max_tokens": 3})
        assert answer["usage"]["prompt_tokens"] == found["count"]
        assert answer["choices"][0]["message"]["content"] == "xyz"

    run(play, script="xyz")


def test_contents_as_parts_and_null() -> None:
    async def play(client: Client) -> None:
        parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
        how = {"max_tokens": 5, "temperature": 0}
        plain = await client.whole(CHAT, {**HELLO, **how})
        in_parts = await client.whole(CHAT, {"messages": [{"role": "user", "content": parts}], **how})
        assert in_parts["choices"] == plain["choices"]
        assert in_parts["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
        empty = await client.whole(CHAT, {"messages": [{"role": "user", "content": None}], "max_tokens": 1})
        assert empty["usage"]["prompt_tokens"] == len(byte_tokenizer().encode("user: \n"))

    run(play)


def test_line_ends_of_unicode_stay_inside_one_line() -> None:
    text = "a\u2028b\u2029c\u0085d\r\ne"

    async def play(client: Client) -> None:
        body = {"prompt": "p", "max_tokens": len(text.encode())}
        assert joined_completion(await client.stream(COMPLETIONS, body))[0]["text"] == text

    run(play, script=list(text.encode()))


def test_json_answers_are_json() -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    formats: list[dict[str, Any]] = [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}},
    ]

    async def play(client: Client) -> None:
        for form in formats:
            answer = await client.whole(CHAT, {**HELLO, "response_format": form, "temperature": 1, "seed": 2})
            choice = answer["choices"][0]
            assert choice["finish_reason"] == "stop"
            assert isinstance(json.loads(choice["message"]["content"]), dict)
        cut = await client.whole(CHAT, {**HELLO, "response_format": formats[1], "max_tokens": 3})
        assert cut["choices"][0]["finish_reason"] == "length"
        free = await client.whole(CHAT, {**HELLO, "response_format": {"type": "text"}, "max_tokens": 3})
        assert free["choices"][0]["finish_reason"] == "length"
        word = await client.whole(COMPLETIONS, {"prompt": "p", "grammar": 'start: "yes" | "no"', "max_tokens": 9})
        assert word["choices"][0]["text"] in ("yes", "no")

    run(play)
