"""The server as a process: a socket, the model loaded beside it, and an orderly end.

The port is taken first, so that one in use is known before any loading. Then the server listens while a thread loads
the model: ``/health`` answers, everything else says 503 until the model is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

from shoal.config import ServerConfig
from shoal.engine.start import start_engine
from shoal.errors import ConfigError
from shoal.server.access.api_key import ApiKey
from shoal.server.app import make_app
from shoal.server.connection import Connection, ConnectionLimits
from shoal.server.service import Condition, ServedModel, Service
from shoal.server.stall_watch import StallWatch

if TYPE_CHECKING:
    from shoal.assembly import LoadedModel

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WATCH_SECONDS = 1
_LOOK_SECONDS = 0.05  # how often a server that is to end looks whether everything is done
_OTHER_FILES = 128  # that may be open beside the connections
_LAST_SECONDS = 5  # for answers on their way when everything is done

_log = logging.getLogger("shoal.server")


def serve(
    config: ServerConfig,
    load: Callable[[], LoadedModel],
    on_ready: Callable[[LoadedModel, ServedModel, str], None],
    keys: Iterable[ApiKey] = (),
) -> None:
    """Serve until a signal. At SIGINT or SIGTERM new requests are answered with 503 and what runs is finished, within
    the grace period; what is left then ends with an error. A second signal ends everything at once.

    load: gives the model; called in a thread. on_ready: told the model and the server's address when requests are
    taken. Raises ConfigError for an address that cannot be had, what ``load`` raises, and EngineDeadError if the engine
    stops.
    """
    service = Service(version=version("shoal"), clock=time.time)
    with (
        _tracing(config.otlp_endpoint) as traced,
        contextlib.closing(bind(config.host, config.port)) as bound,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        allow_connections(config.max_connections)
        runner.run(_serve(_Server(config, service, keys, traced), bound, load, on_ready))


@contextlib.contextmanager
def _tracing(endpoint: str | None) -> Iterator[Callable[[ASGIApp], ASGIApp] | None]:
    """A middleware that sends traces; when this ends, those that are left are sent."""
    if endpoint is None:
        yield None
        return
    try:
        from shoal.server.tracing import Tracing, send_traces
    except ModuleNotFoundError as error:
        raise ConfigError("otlp_endpoint", f"{error.name} is missing: pip install 'shoal[otel]'") from None
    provider = send_traces(endpoint)
    try:
        yield partial(Tracing, tracer=provider.get_tracer("shoal"))
    finally:
        provider.shutdown()


def bind(host: str, port: int) -> socket.socket:
    """A socket for the address, or ConfigError that says what to do."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError("host", f"{host!r} is no address of this machine: {error.strerror}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        what = f"cannot listen on {host} port {port}: {error.strerror}"
        raise ConfigError("port", f"{what}; choose another with --port, or 0 for any that is free") from None
    bound.setblocking(False)
    return bound


def address_of(bound: socket.socket) -> str:
    """How a client on this machine reaches the socket."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def allow_connections(count: int) -> None:
    """Raise this process's limit on open files as far as so many connections need and the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        _log.warning("the system allows this process %d open files, too few for %d connections", hard, count)
        wanted = hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(
    server: _Server,
    bound: socket.socket,
    load: Callable[[], LoadedModel],
    on_ready: Callable[[LoadedModel, ServedModel, str], None],
) -> None:
    config, service = server.options, server.service
    address = address_of(bound)
    loading: asyncio.Future[LoadedModel] = _in_daemon_thread(load)
    serving: asyncio.Future[None] = asyncio.ensure_future(server.serve(sockets=[bound]))
    served: ServedModel | None = None
    draining: asyncio.Future[None] | None = None
    try:
        either: list[asyncio.Future[Any]] = [loading, serving]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and not loading.exception():
            loaded = loading.result()
            name = config.served_name or Path(loaded.name).name.removesuffix(".gguf")
            created = int(loaded.path.stat().st_mtime) if loaded.path.exists() else int(time.time())
            engine = start_engine(loaded)
            served = ServedModel.of(loaded, engine, name=name, created=created, version=service.version)
            service.open(served)
            on_ready(loaded, served, address)
            draining = asyncio.ensure_future(_end_when_done(server, served, config.grace))
        elif loading.done():
            server.should_exit = True
        await serving
        if loading.done():
            loading.result()  # its error
        if served is not None and served.engine.failure is not None:
            _log.error("the engine has failed", exc_info=served.engine.failure)
            raise served.engine.failure
    finally:
        if draining is not None:
            draining.cancel()
        if served is not None:
            served.engine.close()


async def _end_when_done(server: _Server, served: ServedModel, grace: float) -> None:
    """Once the server was told to end: wait for what runs, abort what takes too long, then let it end."""
    await server.told_to_end.wait()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + grace
    while served.client.busy and loop.time() < deadline:
        await asyncio.sleep(_LOOK_SECONDS)
    if served.client.busy:
        # Its requests get a last chunk, so answers end properly, with an error.
        await asyncio.to_thread(served.engine.close)
    server.should_exit = True


def _in_daemon_thread(load: Callable[[], LoadedModel]) -> asyncio.Future[LoadedModel]:
    """Unlike a pool's thread this one does not keep a process from ending that is told to while it loads."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[LoadedModel] = loop.create_future()

    def settle(result: LoadedModel | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        elif result is not None:
            future.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = load()
        except BaseException as problem:  # raised again in the main thread
            error = problem
        with contextlib.suppress(RuntimeError):  # the loop is gone: the process is ending
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="shoal-load", daemon=True).start()
    return future


def uvicorn_config(app: ASGIApp, config: ServerConfig, **more: Any) -> uvicorn.Config:
    """How the library is to serve the application."""
    limits = ConnectionLimits(
        connections=config.max_connections,
        head_seconds=config.body_timeout,
        body_bytes=config.max_body_bytes,
        write_seconds=config.write_timeout,
    )
    return uvicorn.Config(
        app,
        http=partial(Connection, limits=limits),  # type: ignore[arg-type]  # makes one, as the class does
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=config.keep_alive,
        **more,
    )


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: ServerConfig,
        service: Service,
        keys: Iterable[ApiKey],
        traced: Callable[[ASGIApp], ASGIApp] | None,
    ) -> None:
        app = make_app(service, config, logger=logging.getLogger("shoal.requests"), keys=keys, traced=traced)
        super().__init__(
            uvicorn_config(
                app,
                config,
                timeout_graceful_shutdown=_LAST_SECONDS,
                callback_notify=self._watch,
                timeout_notify=_WATCH_SECONDS,
            )
        )
        self.options = config
        self.service = service
        self.told_to_end = asyncio.Event()
        self._watch_step = StallWatch(config.step_timeout)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike the library's: a signal that was obeyed is not raised again, so the process can say how it ended."""
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal asks for an orderly end, the second for one at once, as any does before there is a model."""
        if self.service.condition is Condition.READY:
            self.service.stop_admitting()
            # A signal handler runs between two bytecodes of the loop's own thread, which may be asleep.
            asyncio.get_running_loop().call_soon_threadsafe(self.told_to_end.set)
        else:
            self.force_exit = self.should_exit = True

    async def _watch(self) -> None:
        if self.service.alive and self._watch_step.stuck(self.service.in_step):
            seconds = self.options.step_timeout
            self.service.give_up(f"a step of the engine has not ended in {seconds} s (--step-timeout)")
        if not self.service.alive:
            self.should_exit = True
