"""Showing tools, past calls and their results to a model: natively where its chat template can, otherwise as text.

The fallback is the Hermes form: the tools in the system message, calls as the assistant's text between ``<tool_call>``
tags, results in a user's turn between ``<tool_response>`` tags.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.errors import InvalidRequestError
from shoal.tools.definitions import Tool
from shoal.tools.formats import CALL_CLOSE, CALL_OPEN, shows_calls, shows_results, shows_tools

_INTRODUCTION = """You can call functions to help with the user's request. The functions, one JSON object a line:
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and its arguments between these tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>
The results come back between <tool_response> tags. Answer in plain words when no function is needed."""


def adapt_messages(messages: object, template: str | None, tools: Sequence[Tool] = ()) -> list[Mapping[str, Any]]:
    """Messages for ``ChatTemplate.render``, with everything about tools that the template cannot show made text.

    InvalidRequestError for malformed calls or results; the rest of a message is checked when it is rendered.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidRequestError("messages", f"must be a list of messages, got {type(messages).__name__}")
    calls, results = shows_calls(template), shows_results(template)
    adapted: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            adapted.append(message)
        elif message.get("tool_calls") is not None:
            adapted.append(_calling(message, where, native=calls))
        elif message.get("role") == "tool":
            _add_result(adapted, message, where, native=results)
        else:
            adapted.append({key: value for key, value in message.items() if key != "tool_calls"})
    return _introduced(adapted, tools) if tools and not shows_tools(template) else adapted


def template_tools(template: str | None, tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """What ``ChatTemplate.render`` gets as ``tools``."""
    return [tool.definition() for tool in tools] if tools and shows_tools(template) else None


def _introduced(messages: list[Mapping[str, Any]], tools: Sequence[Tool]) -> list[Mapping[str, Any]]:
    lines = "\n".join(json.dumps(tool.definition()["function"], ensure_ascii=False) for tool in tools)
    text = _INTRODUCTION.format(tools=lines)
    first = messages[0] if messages else {}
    if isinstance(first, Mapping) and first.get("role") in ("system", "developer"):
        content = first.get("content")
        if isinstance(content, str):
            return [{**first, "content": f"{content}\n\n{text}"}, *messages[1:]]
        if isinstance(content, Sequence):
            return [{**first, "content": [*content, {"type": "text", "text": f"\n\n{text}"}]}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _calling(message: Mapping[str, Any], where: str, *, native: bool) -> Mapping[str, Any]:
    if message.get("role") != "assistant":
        raise InvalidRequestError(f"{where}.tool_calls", "only the assistant calls tools")
    given = message["tool_calls"]
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence) or not given:
        raise InvalidRequestError(f"{where}.tool_calls", "must be a non-empty list of calls")
    calls = [_call(item, f"{where}.tool_calls[{index}]") for index, item in enumerate(given)]
    if native:
        return {**message, "tool_calls": calls}
    written = [_written(call["function"]) for call in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    content = message.get("content")
    if content is None or content == "":
        return {**rest, "content": "\n".join(written)}
    if isinstance(content, str):
        return {**rest, "content": "\n".join([content, *written])}
    return {**rest, "content": [*content, {"type": "text", "text": "\n" + "\n".join(written)}]}


def _written(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{CALL_OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CALL_CLOSE}"


def _call(item: object, where: str) -> dict[str, Any]:
    """A past call with its arguments as an object, which is what templates work with."""
    if not isinstance(item, Mapping):
        raise InvalidRequestError(where, "must be an object with id, type and function")
    for key in item:
        if key not in ("id", "type", "function", "index"):
            raise InvalidRequestError(f"{where}.{key}", "unknown field; known are function, id, type")
    if not isinstance(item.get("id"), str):
        raise InvalidRequestError(f"{where}.id", "must be a string")
    if item.get("type", "function") != "function":
        raise InvalidRequestError(f"{where}.type", f"must be 'function', got {item.get('type')!r}")
    function = item.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{where}.function", "must be an object with name and arguments")
    for key in function:
        if key not in ("name", "arguments"):
            raise InvalidRequestError(f"{where}.function.{key}", "unknown field; known are arguments, name")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"{where}.function.name", "must be a non-empty string")
    if not isinstance(arguments, str):
        raise InvalidRequestError(f"{where}.function.arguments", "must be a string that holds a JSON object")
    try:
        # An empty string stands for no arguments in many clients.
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where}.function.arguments", f"is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise InvalidRequestError(f"{where}.function.arguments", "must hold a JSON object")
    return {"id": item["id"], "type": "function", "function": {"name": name, "arguments": parsed}}


def _add_result(adapted: list[Mapping[str, Any]], message: Mapping[str, Any], where: str, *, native: bool) -> None:
    if not isinstance(message.get("tool_call_id"), str):
        raise InvalidRequestError(f"{where}.tool_call_id", "must be the id of the call that this answers")
    if native:
        adapted.append(message)
        return
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        opening, closing = ({"type": "text", "text": text} for text in ("<tool_response>\n", "\n</tool_response>"))
        parts = [opening, *content, closing]
        adapted.append({"role": "user", "content": parts})
        return
    if not isinstance(content, str):
        raise InvalidRequestError(f"{where}.content", "must be a string or a list of parts")
    text = f"<tool_response>\n{content}\n</tool_response>"
    # Results of calls made together stand in one turn.
    if adapted and _is_result(adapted[-1]):
        text = f"{adapted.pop()['content']}\n{text}"
    adapted.append({"role": "user", "content": text})


def _is_result(message: Mapping[str, Any]) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, str) and message.get("role") == "user" and content.endswith("</tool_response>")
