"""Nothing is read, parsed or computed for a request without a valid API key, if there are keys.

The pages that describe the server and those that tell whether it is well are open: they hold nothing of anybody's, and
what asks for them (a load balancer, a service manager) has no key.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.server.access.caller import Callers, Lease
from shoal.server.errors import ApiError
from shoal.server.reply import send_error

_OPEN = frozenset({"/health", "/ready", "/docs", "/docs/oauth2-redirect", "/openapi.json"})
_OPEN_FOLDER = "/docs-files/"
_SCHEME = b"bearer"


class Gate:
    """Middleware. Puts a ``Lease`` into ``scope["state"]["lease"]`` and ends it when the request is over."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller = self._callers.everybody
        path: str = scope["path"]
        if self._callers.known and path not in _OPEN and not path.startswith(_OPEN_FOLDER):
            secret = _secret(scope)
            found = None if secret is None else self._callers.find(secret)
            if found is None:
                scope["state"]["error_code"] = "invalid_api_key"
                await send_error(_refusal(given=secret is not None), send)
                return
            caller = found
        lease = scope["state"]["lease"] = Lease(caller)

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start" and (more := caller.headers()):
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_limits)
        finally:
            lease.end()


def _secret(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, secret = value.partition(b" ")
            if scheme.lower() == _SCHEME:
                return bytes(secret.strip())
    return None


def _refusal(*, given: bool) -> ApiError:
    what = "this API key is not known here" if given else "an API key is needed"
    return ApiError(
        401,
        f"{what}; send the header 'Authorization: Bearer KEY'",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )
