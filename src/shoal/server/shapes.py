"""Values of requests that are checked where they are used, with their shapes for the description of the API."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_TOKENS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT: dict[str, Any] = {"type": "string"}
_NULL: dict[str, Any] = {"type": "null"}


def _shape(*alternatives: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema(alternatives[0] if len(alternatives) == 1 else {"anyOf": [*alternatives]})


Prompt = Annotated[
    Any,
    _shape(
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1},
        _TOKENS,
        {"type": "array", "items": _TOKENS, "minItems": 1},
    ),
]
Stop = Annotated[
    Any,
    _shape(_TEXT, {"type": "array", "items": {"type": "string", "minLength": 1}}, _NULL),
]
LogitBias = Annotated[
    Any,
    _shape(
        {"type": "object", "propertyNames": {"pattern": "^[0-9]+$"}, "additionalProperties": {"type": "number"}}, _NULL
    ),
]
ResponseFormat = Annotated[
    Any,
    _shape(
        {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]},
                "json_schema": {
                    "type": "object",
                    "required": ["name", "schema"],
                    "properties": {
                        "name": _TEXT,
                        "description": _TEXT,
                        "schema": _ANY_OBJECT,
                        "strict": {"type": ["boolean", "null"]},
                    },
                    "additionalProperties": False,
                },
            },
            "additionalProperties": False,
        },
        _NULL,
    ),
]
_CONTENT = {
    "anyOf": [
        _TEXT,
        _NULL,
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": _TEXT},
                "additionalProperties": False,
            },
        },
    ]
}
_CALL = {
    "type": "object",
    "required": ["id", "function"],
    "properties": {
        "id": _TEXT,
        "type": {"const": "function"},
        "index": {"type": "integer"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": _TEXT, "arguments": _TEXT},
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}
Messages = Annotated[
    Any,
    _shape(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {
                    "role": {"type": "string", "minLength": 1},
                    "content": _CONTENT,
                    "name": _TEXT,
                    "tool_calls": {"anyOf": [{"type": "array", "minItems": 1, "items": _CALL}, _NULL]},
                    "tool_call_id": _TEXT,
                    "refusal": {"type": ["string", "null"]},
                    "reasoning_content": {"type": ["string", "null"]},
                },
                "additionalProperties": False,
            },
        }
    ),
]
Tools = Annotated[
    Any,
    _shape(
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "function"],
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {
                            "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
                            "description": {"type": ["string", "null"]},
                            "parameters": {"type": ["object", "null"]},
                            "strict": {"type": ["boolean", "null"]},
                        },
                        "additionalProperties": False,
                    },
                },
                "additionalProperties": False,
            },
        },
        _NULL,
    ),
]
ToolChoice = Annotated[
    Any,
    _shape(
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": _TEXT},
                    "additionalProperties": False,
                },
            },
            "additionalProperties": False,
        },
        _NULL,
    ),
]
