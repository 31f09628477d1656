"""Models, texts, health and the description of the API."""

from __future__ import annotations

import re
from typing import Any

from engine_support import EOS
from hypothesis import given, settings
from hypothesis import strategies as st
from server_support import NAME, NOW, Client, run

from shoal.server.responses import DetokenizeResponse, Model, ModelList, Status, TokenizeResponse, Version


def test_models() -> None:
    async def play(client: Client) -> None:
        listed = (await client.http.get("/v1/models")).json()
        ModelList.model_validate(listed, strict=True)
        one = (await client.http.get(f"/v1/models/{NAME}")).json()
        assert listed["data"] == [one]
        Model.model_validate(one, strict=True)
        assert one == {"id": NAME, "object": "model", "created": NOW, "owned_by": "shoal", "max_model_len": 512}
        missing = await client.http.get("/v1/models/some/other")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"

    run(play)


def test_health_ready_and_version() -> None:
    async def play(client: Client) -> None:
        for path, shape, value in (
            ("/health", Status, {"status": "ok"}),
            ("/ready", Status, {"status": "ready"}),
            ("/version", Version, {"version": "0.0.0"}),
        ):
            answer = await client.http.get(path)
            assert answer.status_code == 200
            assert answer.json() == value
            shape.model_validate(answer.json())

    run(play)


@settings(max_examples=20, deadline=None)
@given(text=st.text(min_size=1, max_size=40))
def test_text_to_tokens_and_back(text: str) -> None:
    async def play(client: Client) -> None:
        found = (await client.post("/tokenize", {"prompt": text, "return_token_strs": True})).json()
        TokenizeResponse.model_validate(found, strict=True)
        assert found["tokens"] == list(text.encode())
        assert (found["count"], found["max_model_len"]) == (len(text.encode()), 512)
        back = (await client.post("/detokenize", {"tokens": found["tokens"]})).json()
        DetokenizeResponse.model_validate(back, strict=True)
        assert back == {"prompt": text}

    run(play)


def test_texts_at_the_edges() -> None:
    async def play(client: Client) -> None:
        assert (await client.post("/tokenize", {"prompt": ""})).json()["tokens"] == []
        assert (await client.post("/tokenize", {"prompt": "a", "add_special_tokens": False})).json()["tokens"] == [97]
        assert (await client.post("/detokenize", {"tokens": []})).json() == {"prompt": ""}
        assert (await client.post("/detokenize", {"tokens": [65, EOS]})).json() == {"prompt": "A<|end|>"}
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
            ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
            (
                "/tokenize",
                {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
                "add_special_tokens",
            ),
            ("/tokenize", {"prompt": "\ud800"}, "prompt"),
            ("/detokenize", {"tokens": [257]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens"),
            ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
            ("/detokenize", {}, "tokens"),
        ):
            assert (await client.refused(path, body))["param"] == param

    run(play)


def test_a_conversation_to_tokens() -> None:
    async def play(client: Client) -> None:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
        found = (await client.post("/tokenize", body)).json()
        assert bytes(found["tokens"]).decode() == "user: Hi\n"
        assert "token_strs" not in found

    run(play)


def test_the_description_is_there_and_names_every_path() -> None:
    async def play(client: Client) -> None:
        described = (await client.http.get("/openapi.json")).json()
        assert set(described["paths"]) == {
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/models",
            "/v1/models/{model}",
            "/tokenize",
            "/detokenize",
            "/health",
            "/ready",
            "/version",
            "/metrics",
        }
        assert "ValidationError" not in str(described)
        assert {"CompletionRequest", "ChatRequest", "ChatChunk"} <= described["components"]["schemas"].keys()
        page = await client.http.get("/docs")
        assert page.status_code == 200
        # Everything it needs comes from here: a machine without internet can show it.
        needed = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert needed
        for place in needed:
            assert (await client.http.get(place)).status_code == 200

    run(play)
