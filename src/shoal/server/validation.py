"""A body's JSON held against its model: the first thing that is wrong, as one sentence that names the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shoal.server.errors import ApiError
from shoal.server.requests import REFUSED

_BodyModel = TypeVar("_BodyModel", bound=BaseModel)
_MAX_SHOWN = 60


def validate(model: type[_BodyModel], value: object) -> _BodyModel:
    """The body as ``model``, or ``ApiError`` 400."""
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {_kind(value)}", code="invalid_json")
    nothing_asked = {name for name in REFUSED if name not in model.model_fields and value.get(name, 0) is None}
    try:
        return model.model_validate({name: item for name, item in value.items() if name not in nothing_asked})
    except ValidationError as error:
        raise _explain(error.errors(include_url=False)[0], model) from None


def _explain(found: ErrorDetails, model: type[BaseModel]) -> ApiError:
    path, got = _path(found["loc"]), found["input"]
    if found["type"] == "extra_forbidden":
        return _unknown(path, model)
    if found["type"] == "missing":
        return ApiError(400, f"{path}: is missing", param=path, code="missing_required_parameter")
    message = found["msg"].partition(" should ")[2] or found["msg"]  # "Input should be ...", "List should have ..."
    return ApiError(400, f"{path}: must {message}, got {_shown(got)}", param=path, code="invalid_value")


def _unknown(path: str, model: type[BaseModel]) -> ApiError:
    if path in REFUSED:
        return ApiError(400, f"{path}: is not supported: {REFUSED[path]}", param=path, code="unsupported_parameter")
    known = ", ".join(sorted(model.model_fields)) if "." not in path else ""
    more = f"; known are {known}" if known else ""
    return ApiError(400, f"{path}: unknown field{more}", param=path, code="unknown_parameter")


def _path(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{_cut(part)}" if text else _cut(part)
    return text


def _shown(value: object) -> str:
    """A value as JSON spells it if it is short, otherwise its kind."""
    if isinstance(value, (list, dict)):
        return _kind(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return "an integer of more than 40 digits"
    if isinstance(value, str):
        return repr(_cut(value))
    return json.dumps(value)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _kind(value: object) -> str:
    kinds: Mapping[type[Any], str] = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a truth value",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return kinds[type(value)]
