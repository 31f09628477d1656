"""The routes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from shoal.config import ServerConfig
from shoal.errors import ShoalError
from shoal.server.access.api_key import ApiKey
from shoal.server.access.caller import Callers
from shoal.server.access.gate import Gate
from shoal.server.answering import Answering
from shoal.server.description import answering, answering_text, describe, reading
from shoal.server.disconnect import ClientGoneError
from shoal.server.errors import ApiError, as_api_error, internal_error
from shoal.server.hosts import HostCheck, allowed_hosts
from shoal.server.incoming import read_request
from shoal.server.metrics import CONTENT_TYPE, Metrics
from shoal.server.prepare import prepare_chat, prepare_completion, tokenize_ids
from shoal.server.reply import error_reply
from shoal.server.reply import json_reply as _json
from shoal.server.request_log import RequestLog
from shoal.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from shoal.server.responses import (
    ChatResponse,
    CompletionResponse,
    DetokenizeResponse,
    Model,
    ModelList,
    Status,
    TokenizeResponse,
    Version,
)
from shoal.server.service import ServedModel, Service
from shoal.server.slow_readers import SlowReaders
from shoal.server.workers import Workers

_UNREADY = {503: "The model is not there."}
_GONE = 499  # nginx's word for a client that left; nobody reads it


def make_app(
    service: Service,
    config: ServerConfig,
    *,
    logger: logging.Logger,
    keys: Iterable[ApiKey] = (),
    clock: Callable[[], float] = time.monotonic,
    traced: Callable[[ASGIApp], ASGIApp] | None = None,
) -> ASGIApp:
    """The application over a service.

    logger: gets a record for every request, at the level INFO. keys: without any, everybody may use the server.
    traced: makes a middleware that traces requests.
    """
    app = FastAPIOffline(
        title="Shoal",
        version=service.version,
        description="An OpenAI-compatible API over an engine that batches.",
        redoc_url=None,
        static_url="/docs-files",
    )
    workers, metrics = Workers(), Metrics(service)
    _add_errors(app)
    _add_generation(app, service, config, workers)
    _add_texts(app, service, config, workers)
    _add_status(app, service, metrics)
    describe(app)
    callers = Callers(keys, clock, share_cache=config.share_cache)
    guarded: ASGIApp = Gate(app, callers)
    hosts = allowed_hosts(config, keys=callers.known)
    if hosts:
        guarded = HostCheck(guarded, hosts)
    if config.cors_origins:
        # Before the keys: a browser asks whether it may send one without sending it.
        guarded = CORSMiddleware(
            guarded,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
    if traced is not None:
        guarded = traced(guarded)
    # Around everything, so that the answer to a bug has an id too.
    return RequestLog(SlowReaders(guarded, config.write_timeout), logger, metrics)


def _add_generation(app: FastAPI, service: Service, config: ServerConfig, workers: Workers) -> None:
    answering = Answering(service, config, workers)

    @app.post("/v1/completions", **reading(CompletionRequest, CompletionResponse, streams=True))
    async def complete(request: Request) -> Response:
        """Continue a text, or several."""
        return await answering.answer(request, CompletionRequest, prepare_completion)

    @app.post("/v1/chat/completions", **reading(ChatRequest, ChatResponse, streams=True))
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        return await answering.answer(request, ChatRequest, prepare_chat)


def _add_texts(app: FastAPI, service: Service, config: ServerConfig, workers: Workers) -> None:
    @app.post("/tokenize", **reading(TokenizeRequest, TokenizeResponse))
    async def tokenize(request: Request) -> Response:
        """The tokens of a text or a conversation."""
        served, body, _ = await read_request(request, service, TokenizeRequest, config)
        ids = await workers.read(tokenize_ids, served, body)
        found = {"count": len(ids), "max_model_len": served.context_length, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = [served.texts.spelling(token_id) for token_id in ids]
        return _json(found)

    @app.post("/detokenize", **reading(DetokenizeRequest, DetokenizeResponse))
    async def detokenize(request: Request) -> Response:
        """The text of tokens; control tokens are spelled out."""
        served, body, _ = await read_request(request, service, DetokenizeRequest, config)
        for token_id in body.tokens:
            if not 0 <= token_id < served.tokenizer.vocab_size:
                last = served.tokenizer.vocab_size - 1
                message = f"tokens: token id {str(token_id)[:40]} is outside the vocabulary, [0, {last}]"
                raise ApiError(400, message, param="tokens", code="invalid_value")
        text = await workers.read(partial(served.tokenizer.decode, skip_special=False), body.tokens)
        return _json({"prompt": text})


def _add_status(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get("/v1/models", **answering(ModelList, _UNREADY))
    async def models() -> Response:
        """The served model, as a list."""
        return _json({"object": "list", "data": [_model(service.model())]})

    @app.get("/v1/models/{model:path}", **answering(Model, {404: "Another model's name.", **_UNREADY}))
    async def model(model: str) -> Response:
        """The served model."""
        served = service.model()
        served.check_name(model)
        return _json(_model(served))

    @app.get("/health", **answering(Status, {503: "The engine has stopped."}))
    async def health() -> Response:
        """Whether the process is well: 200, also while the model is loaded; 503 when the engine has failed."""
        if service.alive:
            return _json({"status": "ok"})
        raise ApiError(503, "the engine has stopped", type="server_error", code="engine_unavailable")

    @app.get("/ready", **answering(Status, {503: "Requests are not taken now."}))
    async def ready() -> Response:
        """Whether requests are taken: 200, or 503 while the model is loaded and when the server is shutting down."""
        if service.ready:
            return _json({"status": "ready"})
        raise ApiError(503, f"not ready: {service.condition}", type="server_error", code="not_ready")

    @app.get("/metrics", **answering_text("Counters, gauges and histograms in Prometheus' format."))
    async def prometheus() -> Response:
        """What the server did and does, for Prometheus."""
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    @app.get("/version", **answering(Version, {}))
    async def version() -> Response:
        """Shoal's version."""
        return _json({"version": service.version})


def _model(served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "shoal",
        "max_model_len": served.context_length,
    }


def _error(request: Request, error: ApiError) -> Response:
    request.state.error_code = error.code or error.type
    return error_reply(error)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return _error(request, error)

    @app.exception_handler(ShoalError)
    async def shoal_error(request: Request, error: ShoalError) -> Response:
        return _error(request, as_api_error(error))

    @app.exception_handler(ClientGoneError)
    async def client_gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=_GONE)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path[:200]}"
        if error.status_code == 405:
            found = ApiError(405, f"{where}: this method is not offered there", code="method_not_allowed")
        else:
            found = ApiError(error.status_code, f"{where}: there is nothing here; see /docs", code="unknown_url")
        found.headers.update(error.headers or {})
        return _error(request, found)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return _error(request, internal_error())
