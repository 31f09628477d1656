"""Reading a prompts file: one JSON object a line, every mistake reported with its line and field.

A line has either ``messages`` (a conversation) or ``prompt`` (plain text), optionally an ``id``, and any sampling
parameters by their names; what it does not set comes from the command line. Empty lines are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.core.params import SamplingParams, parameter_names
from shoal.errors import InvalidRequestError, ShoalError

_OWN_FIELDS = ("id", "messages", "prompt")
_PARAMETERS = parameter_names()
_TEMPLATE_FIELDS = ("role", "content")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """One valid line."""

    id: str | int
    prompt: str | list[dict[str, str]]
    params: SamplingParams


class PromptFileError(ShoalError):
    """A prompts file has bad lines; ``problems`` holds one message for each mistake."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def read_prompts(lines: Iterable[str], name: str, defaults: Mapping[str, Any]) -> list[PromptLine]:
    """All lines of the file called ``name``, or a ``PromptFileError`` with all that is wrong with it."""
    good: list[PromptLine] = []
    problems: list[str] = []
    ids: dict[str | int, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            item = _read_line(line, f"line-{number}", defaults)
            if item.id in ids:
                raise InvalidRequestError("id", f"{item.id!r} stands in line {ids[item.id]} already")
            ids[item.id] = number
            good.append(item)
        except _MistakesError as many:
            problems.extend(f"{where}: {message}" for message in many.messages)
        except InvalidRequestError as error:
            problems.append(f"{where}: {error}")
    if not good and not problems:
        problems.append(f"{name}: holds no prompts")
    if problems:
        raise PromptFileError(tuple(problems))
    return good


class _MistakesError(Exception):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(messages)
        self.messages = messages


def _read_line(line: str, default_id: str, defaults: Mapping[str, Any]) -> PromptLine:
    try:
        # Python's parser takes NaN and Infinity, which are not JSON; as numbers they would be refused later anyway.
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("line", f"is not JSON: {error}") from None
    if not isinstance(item, dict):
        raise InvalidRequestError("line", "must be a JSON object with 'messages' or 'prompt'")
    errors = list(_mistakes(item))
    params = SamplingParams()
    given = {key: value for key, value in item.items() if key in _PARAMETERS}
    try:
        params = SamplingParams.from_mapping({**defaults, **_from_json(given)})
    except InvalidRequestError as error:
        errors.append(str(error))
    if errors:
        raise _MistakesError(errors)
    return PromptLine(
        id=item.get("id", default_id), prompt=item["prompt"] if "prompt" in item else item["messages"], params=params
    )


def _mistakes(item: dict[str, Any]) -> Iterator[str]:
    for key in item:
        if key not in _OWN_FIELDS and key not in _PARAMETERS:
            known = ", ".join((*_OWN_FIELDS, *sorted(_PARAMETERS)))
            yield f"{key}: unknown field; known are {known}"
    if "id" in item and (isinstance(item["id"], bool) or not isinstance(item["id"], (str, int))):
        yield f"id: must be a string or an integer, got {item['id']!r}"
    if ("prompt" in item) == ("messages" in item):
        yield "prompt: give either 'messages' or 'prompt'" + (", not both" if "prompt" in item else "")
    if "prompt" in item and not isinstance(item["prompt"], str):
        yield f"prompt: must be a string, got {type(item['prompt']).__name__}"
    if "messages" in item:
        yield from _message_mistakes(item["messages"])


def _message_mistakes(messages: object) -> Iterator[str]:
    if not isinstance(messages, list) or not messages:
        yield "messages: must be a non-empty list of messages"
        return
    for position, message in enumerate(messages):
        if not isinstance(message, dict):
            yield f"messages[{position}]: must be an object with 'role' and 'content'"
            continue
        for key in _TEMPLATE_FIELDS:
            if not isinstance(message.get(key), str):
                yield f"messages[{position}].{key}: must be a string"
        for key in message:
            if key not in _TEMPLATE_FIELDS:
                yield f"messages[{position}].{key}: unknown field; known are {', '.join(_TEMPLATE_FIELDS)}"


def _from_json(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no integer keys: the ones of ``logit_bias`` come as strings."""
    bias = values.get("logit_bias")
    if isinstance(bias, dict):
        values["logit_bias"] = {_token_id(key): value for key, value in bias.items()}
    return values


def _token_id(key: str) -> int | str:
    return int(key) if key.isascii() and key.isdigit() and len(key) < 20 else key
