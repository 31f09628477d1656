"""Names by which the server may be addressed.

A page on the web can make a browser on this machine send requests to a loopback address by giving its own name that
address ("DNS rebinding"); the browser then takes the server for the page's own and lets it read the answers. Its
requests name the page's host, by which they are known.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.config import ServerConfig
from shoal.server.errors import ApiError
from shoal.server.reply import send_error

LOOPBACK = ("localhost", "127.0.0.1", "::1")
ANY = "*"


def allowed_hosts(config: ServerConfig, *, keys: bool) -> tuple[str, ...]:
    """The names to insist on; none for a server that is meant to be reached from elsewhere, or that wants keys."""
    if not config.allowed_hosts and (keys or config.host not in LOOPBACK):
        return ()
    return (*LOOPBACK, *config.allowed_hosts)


class HostCheck:
    """Middleware. hosts: names without ports, IPv6 addresses without brackets; ``*`` is any."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 421."""
        if scope["type"] == "http" and ANY not in self._hosts:
            host = _host(scope)
            if host and host not in self._hosts:  # no browser leaves it out; health checks may
                scope["state"]["error_code"] = "unknown_host"
                message = f"this server is not known as {host[:100]!r}; if it is to be, start it with --allowed-host"
                await send_error(ApiError(421, message, code="unknown_host"), send)
                return
        await self._app(scope, receive, send)


def _host(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"host":
            host = value.decode("latin-1").lower()
            if host.startswith("["):
                return str(host[1:].partition("]")[0])
            return str(host.partition(":")[0])
    return ""
