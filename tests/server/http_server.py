"""A served null backend on a loopback port, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import uvicorn
from engine_support import make_loaded

from shoal.config import ServerConfig
from shoal.engine.start import start_engine
from shoal.server.access.api_key import ApiKey
from shoal.server.app import make_app
from shoal.server.run import address_of, bind, uvicorn_config
from shoal.server.service import ServedModel, Service


@contextlib.contextmanager
def served_over_http(
    *,
    server_config: ServerConfig = ServerConfig(max_body_bytes=1 << 20),  # noqa: B008  # frozen
    keys: Iterable[ApiKey] = (),
    **options: Any,
) -> Iterator[str]:
    """The address."""
    loaded = make_loaded(**options)
    engine = start_engine(loaded)
    service = Service(version="0.0.0", clock=lambda: 1_700_000_000.0)
    app = make_app(service, server_config, keys=keys, logger=logging.getLogger("shoal.requests"))
    bound = bind("127.0.0.1", 0)
    bound.listen()  # so that whoever comes first waits instead of being refused
    server = uvicorn.Server(uvicorn_config(app, server_config))
    opened = threading.Event()

    async def main() -> None:
        service.open(ServedModel.of(loaded, engine, name="fake", created=1, version="0.0.0"))
        opened.set()
        await server.serve(sockets=[bound])

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        assert opened.wait(30)
        yield address_of(bound)
    finally:
        server.should_exit = True
        thread.join(30)
        engine.close()
        bound.close()
        assert not thread.is_alive()
