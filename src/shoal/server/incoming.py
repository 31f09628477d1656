"""From the bytes of a request to a valid body and the model that it is for."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel

from shoal.config import ServerConfig
from shoal.server.body import read_body
from shoal.server.encoding import from_json
from shoal.server.service import ServedModel, Service
from shoal.server.validation import validate

_Body = TypeVar("_Body", bound=BaseModel)


async def read_request(
    request: Request, service: Service, model: type[_Body], config: ServerConfig
) -> tuple[ServedModel, _Body, int]:
    """The model, the valid body and its size in bytes."""
    data = await read_body(request, config.max_body_bytes, config.body_timeout)
    body = validate(model, from_json(data))
    served = service.model()
    served.check_name(getattr(body, "model", None))
    return served, body, len(data)
