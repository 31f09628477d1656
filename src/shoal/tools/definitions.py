"""The tools of a request and which of them may or must be called, in OpenAI's shape, checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from shoal.core.grammar import GrammarSpec, schema_spec
from shoal.errors import InvalidRequestError

MAX_TOOLS = 128
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. ``parameters`` is the JSON schema of its arguments, as text."""

    name: str
    description: str
    parameters: GrammarSpec

    def definition(self) -> dict[str, Any]:
        """In the shape that chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": json.loads(self.parameters.text)}
        return {"type": "function", "function": function}


class Mode(StrEnum):
    """What the caller wants called."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """``name``: the one tool that must be called (mode ``required``); None leaves the choice to the model."""

    mode: Mode
    name: str | None = None


def parse_tools(value: object) -> tuple[Tool, ...]:
    """The request's ``tools``; None and an empty list are none. InvalidRequestError names the place."""
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InvalidRequestError("tools", f"must be a list of tools, got {type(value).__name__}")
    if len(value) > MAX_TOOLS:
        raise InvalidRequestError("tools", f"at most {MAX_TOOLS}, got {len(value)}")
    tools = tuple(_tool(item, f"tools[{index}]") for index, item in enumerate(value))
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise InvalidRequestError(f"tools[{index}].function.name", f"{tool.name!r} stands there twice")
        seen.add(tool.name)
    return tools


def parse_tool_choice(value: object, tools: Sequence[Tool]) -> ToolChoice:
    """The request's ``tool_choice``; None is ``auto`` with tools and ``none`` without."""
    if value is None:
        return ToolChoice(Mode.AUTO if tools else Mode.NONE)
    if isinstance(value, str):
        if value not in set(Mode):
            raise InvalidRequestError("tool_choice", f"must be none, auto, required or a function, got {value!r}")
        choice = ToolChoice(Mode(value))
    else:
        choice = ToolChoice(Mode.REQUIRED, _named(value, tools))
    if choice.mode is Mode.REQUIRED and not tools:
        raise InvalidRequestError("tool_choice", "asks for a call, but there are no tools")
    return choice


def parse_parallel(value: object) -> bool:
    """The request's ``parallel_tool_calls``; None is true."""
    if value is None:
        return True
    if not isinstance(value, bool):
        raise InvalidRequestError("parallel_tool_calls", f"must be true or false, got {value!r}")
    return value


def _named(value: object, tools: Sequence[Tool]) -> str:
    where = "tool_choice"
    if not isinstance(value, Mapping):
        raise InvalidRequestError(where, "must be none, auto, required or {'type': 'function', 'function': {'name'}}")
    _known(value, {"type", "function"}, where)
    if value.get("type") != "function":
        raise InvalidRequestError(f"{where}.type", f"must be 'function', got {value.get('type')!r}")
    function = value.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{where}.function", "must be an object with a name")
    _known(function, {"name"}, f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or all(tool.name != name for tool in tools):
        raise InvalidRequestError(f"{where}.function.name", f"must be one of the tools' names, got {name!r}")
    return name


def _tool(item: object, where: str) -> Tool:
    if not isinstance(item, Mapping):
        raise InvalidRequestError(where, f"must be an object with type and function, got {type(item).__name__}")
    _known(item, {"type", "function"}, where)
    if item.get("type") != "function":
        raise InvalidRequestError(f"{where}.type", f"must be 'function', got {item.get('type')!r}")
    function, where = item.get("function"), f"{where}.function"
    if not isinstance(function, Mapping):
        raise InvalidRequestError(where, "must be an object with name, description and parameters")
    _known(function, {"name", "description", "parameters", "strict"}, where)
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(f"{where}.name", "must be 1 to 64 letters, digits, underscores or hyphens")
    if not isinstance(description, (str, type(None))):
        raise InvalidRequestError(f"{where}.description", "must be a string")
    if not isinstance(function.get("strict"), (bool, type(None))):
        raise InvalidRequestError(f"{where}.strict", "must be true or false")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = NO_PARAMETERS
    if not isinstance(parameters, Mapping):
        raise InvalidRequestError(f"{where}.parameters", "must be the JSON schema of an object")
    if parameters.get("type", "object") != "object":
        raise InvalidRequestError(f"{where}.parameters.type", f"must be 'object', got {parameters['type']!r}")
    return Tool(name, description or "", schema_spec({"type": "object", **parameters}, f"{where}.parameters"))


def _known(value: Mapping[Any, Any], known: set[str], where: str) -> None:
    for key in value:
        if key not in known:
            raise InvalidRequestError(f"{where}.{key}", f"unknown field; known are {', '.join(sorted(known))}")
