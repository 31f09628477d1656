from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli.prompt_file import PromptFileError, read_prompts

EXAMPLES = Path(__file__).parents[2] / "examples" / "prompts.jsonl"


def problems(*lines: str, defaults: dict[str, object] | None = None) -> tuple[str, ...]:
    with pytest.raises(PromptFileError) as caught:
        read_prompts(lines, "f", defaults or {})
    return caught.value.problems


def test_a_line_overrides_the_defaults() -> None:
    lines = [
        '{"prompt": "a"}',
        "",
        '{"id": "x", "messages": [{"role": "user", "content": "b"}], "seed": 4, "stop": "."}',
    ]
    first, second = read_prompts(lines, "f", {"seed": 1, "max_tokens": 9})
    assert (first.id, first.prompt, first.params.seed, first.params.max_tokens) == ("line-1", "a", 1, 9)
    assert (second.id, second.params.seed, second.params.max_tokens) == ("x", 4, 9)
    assert second.params.stop == (".",)
    assert second.prompt == [{"role": "user", "content": "b"}]


def test_token_ids_of_logit_bias_come_as_strings() -> None:
    (line,) = read_prompts(['{"prompt": "a", "logit_bias": {"12": -1}}'], "f", {})
    assert line.params.logit_bias == {12: -1}


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "f:1: line: is not JSON"),
        ("[" * 100_000, "f:1: line: is not JSON"),
        ("[1]", "f:1: line: must be a JSON object"),
        ("{}", "f:1: prompt: give either"),
        ('{"prompt": "a", "messages": []}', "not both"),
        ('{"prompt": 3}', "f:1: prompt: must be a string"),
        ('{"messages": []}', "f:1: messages: must be a non-empty list"),
        ('{"messages": ["a"]}', "f:1: messages[0]: must be an object"),
        ('{"messages": [{"role": "user"}]}', "f:1: messages[0].content: must be a string"),
        ('{"messages": [{"role": "user", "content": "a", "name": "b"}]}', "f:1: messages[0].name: unknown field"),
        ('{"prompt": "a", "temprature": 1}', "f:1: temprature: unknown field"),
        ('{"prompt": "a", "temperature": NaN}', "f:1: temperature: must be finite"),
        ('{"prompt": "a", "temperature": true}', "f:1: temperature: must be a number"),
        ('{"prompt": "a", "max_tokens": -1}', "f:1: max_tokens: must be in"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "f:1: logit_bias: must be an integer"),
        ('{"prompt": "a", "id": null}', "f:1: id: must be a string"),
    ],
)
def test_a_mistake_names_line_and_field(line: str, part: str) -> None:
    found = problems(line)
    assert any(part in problem for problem in found), found


def test_all_mistakes_are_reported_at_once() -> None:
    found = problems('{"prompt": "a", "x": 1, "y": 2}', '{"prompt": "good"}', "nonsense", '{"prompt": "a", "top_p": 2}')
    assert [problem.split(": ")[:2] for problem in found] == [
        ["f:1", "x"],
        ["f:1", "y"],
        ["f:3", "line"],
        ["f:4", "top_p"],
    ]


def test_an_id_stands_once() -> None:
    assert problems('{"prompt": "a", "id": 1}', '{"prompt": "b", "id": 1}') == ("f:2: id: 1 stands in line 1 already",)


def test_a_file_without_prompts_is_a_mistake() -> None:
    assert problems("", "  ") == ("f: holds no prompts",)


def test_the_example_file_is_valid_and_varied() -> None:
    with EXAMPLES.open(encoding="utf-8") as lines:
        prompts = read_prompts(lines, "examples", {})
    assert len(prompts) == 32
    assert all(line.params.max_tokens is not None and 24 <= line.params.max_tokens <= 200 for line in prompts)
    assert all(line.params.greedy or line.params.seed is not None for line in prompts), "every answer is reproducible"
    sampled = [line for line in prompts if not line.params.greedy]
    assert 0 < len(sampled) < len(prompts) / 2
    systems = [json.dumps(line.prompt[0]) for line in prompts if line.prompt[0]["role"] == "system"]  # type: ignore[index]
    assert len(set(systems)) < len(systems), "some share a system message"
