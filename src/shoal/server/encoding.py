"""Bytes to JSON and back, more strictly than the standard library's defaults.

In: UTF-8, no NaN or infinities (a literal such as 1e999 would be one), no name twice in an object, no nesting deep
enough to trouble anything that walks a value recursively, and not so many values that parsing them holds up others.
Out: no NaN either, always valid UTF-8, always one line for whoever reads lines, also by the Unicode characters that
some libraries take for line ends.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from shoal.server.errors import ApiError

MAX_DEPTH = 100
# Parsing takes time by the value, not by the byte, and nobody is served meanwhile. Brackets and commas inside of texts
# count too, which spares telling them apart.
MAX_BRACKETS = 100_000
MAX_COMMAS = 1_000_000
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_LINE_ENDS = str.maketrans({"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def from_json(body: bytes) -> Any:
    """The value of a request's body; ``ApiError`` 400 says where it is broken."""
    if not body.strip():
        raise _broken("the body is empty; send a JSON object")
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        raise _broken(f"the body has more than {MAX_BRACKETS} opening brackets; split it up")
    if body.count(b",") > MAX_COMMAS:
        raise _broken(f"the body has more than {MAX_COMMAS} commas; split it up")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _broken(f"the body is not UTF-8: byte {error.start}") from None
    try:
        value = json.loads(
            text, parse_constant=_no_constant, parse_float=_finite_float, object_pairs_hook=_object_without_repeats
        )
    except json.JSONDecodeError as error:
        raise _broken(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # of the hooks, and of integers with thousands of digits
        message = "an integer has too many digits" if "digits" in str(error) else str(error)
        raise _broken(f"the body is not acceptable JSON: {message}") from None
    _check_depth(value)
    return value


def to_json(value: Any) -> bytes:
    """Strict JSON on one line, as UTF-8. A lone surrogate, which has no UTF-8, becomes a question mark."""
    text = _ENCODER.encode(value)
    return text.encode("ascii") if text.isascii() else text.translate(_LINE_ENDS).encode("utf-8", "replace")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        repeated = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {repeated[:80]!r} stands twice in one object")
    return found


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
    if level:
        raise _too_deep()


def _too_deep() -> ApiError:
    return _broken(f"the body is nested more than {MAX_DEPTH} levels deep")


def _broken(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_json")
