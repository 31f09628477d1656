"""Constraints on the real model: its own vocabulary, the native sampler, and free sequences beside constrained ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from grammar_support import TREE, json_schema

from shoal.core.params import SamplingParams
from shoal.core.request import FinishReason
from shoal.engine.llm import LLM

pytestmark = pytest.mark.model
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "été", "日本"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Invent a person. Answer in JSON."}]


@pytest.fixture(scope="module")
def llm(model_path: Path) -> Iterator[LLM]:
    with LLM(model_path, max_num_seqs=8, context_length=512, kv_tokens=4096) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_texts_fit(llm: LLM, temperature: float) -> None:
    params = SamplingParams(
        response_format=json_schema(PERSON), temperature=temperature, seed=1, n=3, max_tokens=200, logprobs=2
    )
    for output in llm.chat(MESSAGES, params).completions:
        assert output.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(output.text), PERSON)
        assert all(entry.logprob > float("-inf") for entry in output.logprobs)


def test_a_batch_gives_what_each_gives_alone(llm: LLM) -> None:
    every = [
        SamplingParams(temperature=0.0, max_tokens=24),
        SamplingParams(seed=2, max_tokens=24),
        SamplingParams(seed=3, max_tokens=24, regex=r"[A-Z][a-z]+ is \d+ years old\."),
        SamplingParams(seed=4, max_tokens=24, response_format=json_schema(TREE)),
        SamplingParams(temperature=0.0, max_tokens=24, response_format={"type": "json_object"}, logprobs=1),
    ]
    together = llm.generate([MESSAGES] * len(every), every)
    alone = [llm.chat(MESSAGES, params) for params in every]
    assert [output.completions for output in together] == [output.completions for output in alone]
    assert re.fullmatch(r"[A-Z][a-z]+ is \d+ years old\.", together[2].text)
