"""Errors as the OpenAI API tells them: a status and ``{"error": {"message", "type", "param", "code"}}``.

Everything that Shoal raises on purpose has its place here. What is left is a bug: it is answered with a 500 that says
nothing about the inside, and logged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shoal.errors import (
    EngineError,
    InvalidRequestError,
    RequestFailedError,
    ShoalError,
)

INVALID = "invalid_request_error"
SERVER = "server_error"
RATE_LIMIT = "rate_limit_error"
RETRY_SECONDS = 1


class ApiError(Exception):
    """An answer with an error object.

    param: the request's field that is at fault. code: a word that programs look for.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error object."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


def as_api_error(error: ShoalError) -> ApiError:
    """How a caller learns of one of Shoal's errors."""
    retry = retry_after(RETRY_SECONDS)
    match error:
        case InvalidRequestError():
            return ApiError(400, str(error), param=error.field, code=error.code)
        case RequestFailedError():
            return ApiError(500, str(error), type=SERVER, code="request_failed")
        case EngineError():
            return ApiError(503, str(error), type=SERVER, code="engine_unavailable", headers=retry)
        case _:
            return internal_error()


def retry_after(seconds: float) -> dict[str, str]:
    """The header that says when to try again, in whole seconds, at least one."""
    return {"retry-after": str(max(math.ceil(seconds), RETRY_SECONDS))}


def internal_error() -> ApiError:
    """For a bug: what went wrong is in the log, not in the answer."""
    return ApiError(500, "internal error; the server's log says more", type=SERVER, code="internal_error")
