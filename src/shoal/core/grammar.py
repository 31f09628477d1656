"""What a completion's text must look like, as a value: a JSON schema, a regular expression or a grammar.

Here only the outer shape is checked: types, sizes, nesting. Whether the text compiles is found out by the backend that
will honour it, when a request is resolved (``shoal.grammar``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from shoal.errors import InvalidRequestError

MAX_GRAMMAR_BYTES = 128 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_NAME = 64
ANY_OBJECT = '{"type": "object"}'

_FORMATS = ("text", "json_object", "json_schema")


class GrammarKind(StrEnum):
    """The language that a specification is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint on a completion's text. ``field`` is the parameter that it came from, for errors only."""

    kind: GrammarKind
    text: str
    field: str = field(default="grammar", compare=False)

    def __post_init__(self) -> None:
        if not self.text:
            raise InvalidRequestError(self.field, "must not be empty")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError:
            raise InvalidRequestError(self.field, "must be Unicode text; it holds a lone surrogate") from None
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(self.field, f"has {size} bytes; at most {MAX_GRAMMAR_BYTES} are accepted")


def schema_spec(schema: object, field: str) -> GrammarSpec:
    """A JSON schema, given as an object or as ``true``; ``field`` names it in errors."""
    if not isinstance(schema, (Mapping, bool)):
        raise InvalidRequestError(field, f"must be a JSON schema, an object, got {type(schema).__name__}")
    if schema is False:
        raise InvalidRequestError(field, "false allows no text at all")
    _check_depth(schema, field)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(field, f"must be JSON: {error}") from None
    return GrammarSpec(GrammarKind.JSON_SCHEMA, text, field)


def choose_constraint(response_format: object, regex: object, grammar: object) -> GrammarSpec | None:
    """The one constraint that the three parameters ask for; None when the text is free."""
    given = []
    if response_format is not None:
        given.append(("response_format", _response_format(response_format)))
    if regex is not None:
        given.append(("regex", _text(GrammarKind.REGEX, regex, "regex")))
    if grammar is not None:
        lark = grammar if isinstance(grammar, GrammarSpec) else _text(GrammarKind.LARK, grammar, "grammar")
        given.append(("grammar", lark))
    constraints = [(name, spec) for name, spec in given if spec is not None]
    if len(constraints) > 1:
        raise InvalidRequestError(
            constraints[1][0], f"cannot be combined with {constraints[0][0]}; one constraint at a time"
        )
    return constraints[0][1] if constraints else None


def _text(kind: GrammarKind, value: object, field: str) -> GrammarSpec:
    if not isinstance(value, str):
        raise InvalidRequestError(field, f"must be a string, got {type(value).__name__}")
    return GrammarSpec(kind, value, field)


def _response_format(value: object) -> GrammarSpec | None:
    """OpenAI's shape: ``{"type": "text" | "json_object" | "json_schema", "json_schema": {...}}``."""
    where = "response_format"
    if not isinstance(value, Mapping):
        raise InvalidRequestError(where, f"must be an object with a type, got {type(value).__name__}")
    kind = value.get("type")
    if kind not in _FORMATS:
        raise InvalidRequestError(f"{where}.type", f"must be one of {', '.join(_FORMATS)}, got {kind!r}")
    _known(value, {"type", "json_schema"} if kind == "json_schema" else {"type"}, where)
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarSpec(GrammarKind.JSON_SCHEMA, ANY_OBJECT, where)
    return _named_schema(value.get("json_schema"), f"{where}.json_schema")


def _named_schema(value: object, where: str) -> GrammarSpec:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(where, "must be an object with name and schema")
    _known(value, {"name", "description", "schema", "strict"}, where)
    name = value.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_SCHEMA_NAME:
        raise InvalidRequestError(f"{where}.name", f"must be a string of 1 to {MAX_SCHEMA_NAME} characters")
    if not isinstance(value.get("description"), (str, type(None))):
        raise InvalidRequestError(f"{where}.description", "must be a string")
    if not isinstance(value.get("strict"), (bool, type(None))):
        raise InvalidRequestError(f"{where}.strict", "must be true or false")
    if "schema" not in value:
        raise InvalidRequestError(f"{where}.schema", "is missing")
    return schema_spec(value["schema"], f"{where}.schema")


def _known(value: Mapping[Any, Any], known: set[str], where: str) -> None:
    for key in value:
        if key not in known:
            raise InvalidRequestError(f"{where}.{key}", f"unknown field; known are {', '.join(sorted(known))}")


def _check_depth(value: object, field: str) -> None:
    """Without recursion: what is too deep for a recursive function is what is to be found."""
    level: list[object] = [value]
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise InvalidRequestError(field, f"is nested more than {MAX_SCHEMA_DEPTH} levels deep")


def _inside(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else []
