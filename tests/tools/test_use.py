"""Tools of a request: what is refused, what the model is shown, and obligatory calls that always validate."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from engine_support import make_loaded

from shoal.core.params import SamplingParams
from shoal.core.request import FinishReason
from shoal.engine.llm import LLM
from shoal.errors import InvalidRequestError
from shoal.text.chat_template import ChatTemplate
from shoal.tools.definitions import Mode
from shoal.tools.formats import ToolFormat, choose_format
from shoal.tools.parser import ContentDelta, ToolCallDelta
from shoal.tools.prompting import adapt_messages
from shoal.tools.use import prepare_tools

PLAIN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
NATIVE = (
    "{% if tools %}{% for t in tools %}<tool_call>{{ t.function.name }}{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'tool' %}!{% endif %}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.arguments.city }}{% endfor %}{% endif %}{% endfor %}"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock", "strict": True}}
TOOLS = [WEATHER, CLOCK]


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("tools", {"tools": "x"}),
        ("tools", {"tools": [CLOCK] * 200}),
        ("tools[0]", {"tools": ["x"]}),
        ("tools[1].type", {"tools": [CLOCK, {"type": "retrieval"}]}),
        ("tools[0].extra", {"tools": [{**CLOCK, "extra": 1}]}),
        ("tools[0].function", {"tools": [{"type": "function"}]}),
        ("tools[0].function.name", {"tools": [tool(name="has space")]}),
        ("tools[1].function.name", {"tools": [CLOCK, CLOCK]}),
        ("tools[0].function.description", {"tools": [tool(description=1)]}),
        ("tools[0].function.strict", {"tools": [tool(strict="yes")]}),
        ("tools[0].function.parameters", {"tools": [tool(parameters=[])]}),
        ("tools[0].function.parameters.type", {"tools": [tool(parameters={"type": "string"})]}),
        ("tools[0].function.else", {"tools": [tool(**{"else": 1})]}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "must"}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": 1}),
        ("tool_choice.type", {"tools": TOOLS, "tool_choice": {"type": "x"}}),
        ("tool_choice.function", {"tools": TOOLS, "tool_choice": {"type": "function"}}),
        ("tool_choice.function.name", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}),
        ("parallel_tool_calls", {"tools": TOOLS, "parallel_tool_calls": 1}),
    ],
)
def test_what_is_wrong_is_named(field: str, request_: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        prepare_tools(template=PLAIN, **request_)
    assert caught.value.field == field


def test_defaults() -> None:
    assert prepare_tools(template=PLAIN).choice.mode is Mode.NONE
    assert prepare_tools(template=PLAIN).parser() is None
    use = prepare_tools(template=PLAIN, tools=TOOLS)
    assert (use.choice.mode, use.parallel, use.constraint) == (Mode.AUTO, True, None)
    none = prepare_tools(template=PLAIN, tools=TOOLS, tool_choice="none")
    assert none.parser() is None
    assert none.prompt([{"role": "user", "content": "x"}]) == ([{"role": "user", "content": "x"}], None)


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (None, ToolFormat.HERMES),
        (PLAIN, ToolFormat.HERMES),
        (NATIVE, ToolFormat.HERMES),
        ("{{ '[TOOL_CALLS]' }}", ToolFormat.MISTRAL),
        ("Environment: ipython", ToolFormat.LLAMA3),
    ],
)
def test_the_format_is_seen_in_the_template(template: str | None, format: ToolFormat) -> None:
    assert choose_format(template) is format
    assert prepare_tools(template=template, format=ToolFormat.MISTRAL).format is ToolFormat.MISTRAL


CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rom"}'}},
            {"id": "2", "type": "function", "function": {"name": "clock", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "2", "content": "noon"},
]


def rendered(template: str, **request: Any) -> str:
    messages, tools = prepare_tools(template=template, **request).prompt(CONVERSATION)
    return "".join(text for text, _ in ChatTemplate(template).render(messages, tools=tools))


def test_a_template_without_tools_gets_them_as_text() -> None:
    text = rendered(PLAIN, tools=TOOLS)
    assert text.startswith("[system]Be kind.\n\nYou can call functions")
    for shown in TOOLS:
        assert f'"name": "{shown["function"]["name"]}"' in text
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>' in text
    assert '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>' in text
    answers = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    assert text.endswith(f"[user]{answers}\n")
    messages, _ = prepare_tools(template=PLAIN, tools=TOOLS).prompt([{"role": "user", "content": "x"}])
    assert [message["role"] for message in messages] == ["system", "user"]


def test_a_template_with_tools_gets_them_natively() -> None:
    assert rendered(NATIVE, tools=TOOLS) == (
        "<tool_call>get_weather<tool_call>clock[system]Be kind.[user]Weather?[assistant]Rom[tool]sunny![tool]noon!"
    )


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("messages[0].tool_calls", {"role": "user", "content": "", "tool_calls": [{}]}),
        ("messages[0].tool_calls", {"role": "assistant", "tool_calls": []}),
        ("messages[0].tool_calls[0].id", {"role": "assistant", "tool_calls": [{}]}),
        ("messages[0].tool_calls[0].function", {"role": "assistant", "tool_calls": [{"id": "1"}]}),
        ("messages[0].tool_call_id", {"role": "tool", "content": "x"}),
        ("messages[0].content", {"role": "tool", "tool_call_id": "1"}),
    ],
)
def test_malformed_calls_and_results_are_named(field: str, message: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        adapt_messages([message], PLAIN)
    assert caught.value.field == field


@pytest.mark.parametrize("arguments", ["{", "[]", "1", None])
def test_arguments_of_past_calls_are_objects(arguments: object) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(InvalidRequestError) as caught:
        adapt_messages([{"role": "assistant", "tool_calls": [call]}], PLAIN)
    assert caught.value.field == "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize("format", ToolFormat)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("parallel", [True, False])
def test_obligatory_calls_always_validate(format: ToolFormat, choice: object, parallel: bool) -> None:
    use = prepare_tools(tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel, template=PLAIN, format=format)
    params = SamplingParams(grammar=use.constraint, seed=7, n=8, max_tokens=900)
    with LLM.from_loaded(make_loaded(context_length=2048, blocks=1024)) as llm:
        for spec in use.schemas:
            llm.model.backend.check_grammar(spec)
        outputs = llm.generate("go", params)[0].completions
    schemas = {tool.name: json.loads(tool.parameters.text) for tool in use.tools}
    whole = 0
    for output in outputs:
        assert output.error is None
        parser = use.parser()
        assert parser is not None
        deltas = [delta for char in output.text for delta in parser.push(char)] + parser.finish()
        if output.finish_reason is not FinishReason.STOP:
            continue
        whole += 1
        calls: dict[int, tuple[str, str]] = {}
        for delta in deltas:
            assert not isinstance(delta, ContentDelta)
            name, arguments = calls.get(delta.index, (delta.name or "", ""))
            calls[delta.index] = (name, arguments + delta.arguments)
        assert calls
        if not parallel or not isinstance(choice, str):
            assert len(calls) == 1
        for name, arguments in calls.values():
            assert isinstance(choice, str) or name == "get_weather"
            jsonschema.validate(json.loads(arguments), schemas[name])
    assert whole


def test_a_schema_that_cannot_be_held_is_named_as_the_tools() -> None:
    use = prepare_tools(tools=[tool(parameters={"not": {}})], tool_choice="required", template=PLAIN)
    with LLM.from_loaded(make_loaded()) as llm, pytest.raises(InvalidRequestError) as caught:
        llm.model.backend.check_grammar(use.schemas[0])
    assert caught.value.field == "tools[0].function.parameters"


def test_ids_are_fresh() -> None:
    use = prepare_tools(tools=TOOLS, template=PLAIN)
    ids = set()
    for _ in range(3):
        parser = use.parser()
        assert parser is not None
        (delta,) = parser.push('<tool_call>{"name": "clock", "arguments": {}}</tool_call>')
        assert isinstance(delta, ToolCallDelta)
        ids.add(delta.id)
    assert len(ids) == 3
