"""Chat messages as users give them, checked and brought into one shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.errors import InvalidRequestError

_KNOWN = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning_content"})
_MAX_ROLE = 64


def normalize_messages(messages: object) -> list[dict[str, Any]]:
    """A list of messages with string roles and string contents; everything else as it was.

    Content may be a string, null (an empty string), or parts of type "text", which are joined.
    InvalidRequestError names the place, such as ``messages[2].content``.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidRequestError("messages", f"must be a list of messages, got {type(messages).__name__}")
    return [_message(item, f"messages[{index}]") for index, item in enumerate(messages)]


def _message(item: object, where: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise InvalidRequestError(where, f"must be an object with role and content, got {type(item).__name__}")
    for key in item:
        if key not in _KNOWN:
            raise InvalidRequestError(f"{where}.{key}", f"unknown field; known are {', '.join(sorted(_KNOWN))}")
    role = item.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{where}.role", f"must be a non-empty string, got {role!r}")
    if len(role) > _MAX_ROLE:
        raise InvalidRequestError(f"{where}.role", f"has at most {_MAX_ROLE} characters, got {len(role)}")
    if "content" not in item and "tool_calls" not in item:
        raise InvalidRequestError(f"{where}.content", "is missing")
    return {**item, "content": _content(item.get("content"), f"{where}.content")}


def _content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, bytes) or not isinstance(content, Sequence):
        raise InvalidRequestError(where, f"must be a string or a list of parts, got {type(content).__name__}")
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequestError(where, f"must be an object such as {{'type': 'text', 'text': ...}}, got {part!r}")
    if part.get("type") != "text":
        raise InvalidRequestError(f"{where}.type", f"only 'text' is supported, got {part.get('type')!r}")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.text", f"must be a string, got {type(text).__name__}")
    extra = set(part) - {"type", "text"}
    if extra:
        raise InvalidRequestError(f"{where}.{min(map(str, extra))}", "unknown field")
    return text
