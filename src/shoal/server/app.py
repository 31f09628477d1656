"""The routes."""

from __future__ import annotations

import logging
import secrets
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from shoal.errors import ShoalError
from shoal.server.answers.answer import Answer
from shoal.server.body import read_body
from shoal.server.description import answering, answering_text, describe, reading
from shoal.server.disconnect import ClientGoneError, while_connected
from shoal.server.encoding import from_json, to_json
from shoal.server.errors import ApiError, as_api_error, internal_error
from shoal.server.metrics import CONTENT_TYPE, Metrics
from shoal.server.prepare import is_light, prepare_chat, prepare_completion, tokenize_ids
from shoal.server.request_log import Generated, RequestLog
from shoal.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
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
from shoal.server.sse import EventStream
from shoal.server.validation import validate
from shoal.server.work import Work
from shoal.server.workers import Workers

_BodyModel = TypeVar("_BodyModel", bound=BaseModel)
_UNREADY = {503: "The model is not there."}
_GONE = 499  # nginx's word for a client that left; nobody reads it


def make_app(service: Service, *, max_body_bytes: int, logger: logging.Logger) -> ASGIApp:
    """The application over a service. logger: gets a line for every request, at the level INFO."""
    app = FastAPIOffline(
        title="Shoal",
        version=service.version,
        description="An OpenAI-compatible API over an engine that batches.",
        redoc_url=None,
        static_url="/docs-files",
    )
    workers, metrics = Workers(), Metrics(service)
    _add_errors(app)
    _add_generation(app, service, max_body_bytes, workers)
    _add_texts(app, service, max_body_bytes, workers)
    _add_status(app, service, metrics)
    describe(app)
    # Around everything, so that the answer to a bug has an id too.
    return RequestLog(app, logger, metrics)


def _add_generation(app: FastAPI, service: Service, max_body_bytes: int, workers: Workers) -> None:
    @app.post("/v1/completions", **reading(CompletionRequest, CompletionResponse, streams=True))
    async def complete(request: Request) -> Response:
        """Continue a text, or several."""
        served, body, size = await _read(request, service, CompletionRequest, max_body_bytes)
        if is_light(body, size):
            return await _answer(request, service, body, prepare_completion(served, body))
        return await _answer(request, service, body, await workers.prepare(prepare_completion, served, body))

    @app.post("/v1/chat/completions", **reading(ChatRequest, ChatResponse, streams=True))
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        served, body, size = await _read(request, service, ChatRequest, max_body_bytes)
        if is_light(body, size):
            return await _answer(request, service, body, prepare_chat(served, body))
        return await _answer(request, service, body, await workers.prepare(prepare_chat, served, body))


def _add_texts(app: FastAPI, service: Service, max_body_bytes: int, workers: Workers) -> None:
    @app.post("/tokenize", **reading(TokenizeRequest, TokenizeResponse))
    async def tokenize(request: Request) -> Response:
        """The tokens of a text or a conversation."""
        served, body, _ = await _read(request, service, TokenizeRequest, max_body_bytes)
        ids = await workers.read(tokenize_ids, served, body)
        found = {"count": len(ids), "max_model_len": served.context_length, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = [served.texts.spelling(token_id) for token_id in ids]
        return _json(found)

    @app.post("/detokenize", **reading(DetokenizeRequest, DetokenizeResponse))
    async def detokenize(request: Request) -> Response:
        """The text of tokens; control tokens are spelled out."""
        served, body, _ = await _read(request, service, DetokenizeRequest, max_body_bytes)
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


async def _read(
    request: Request, service: Service, model: type[_BodyModel], max_bytes: int
) -> tuple[ServedModel, _BodyModel, int]:
    """The model, the valid body and its size in bytes."""
    data = await read_body(request, max_bytes)
    body = validate(model, from_json(data))
    served = service.model()
    served.check_name(getattr(body, "model", None))
    return served, body, len(data)


async def _answer(request: Request, service: Service, body: Generation, work: Work) -> Response:
    stream = work.served.client.queue(work.requests)
    answer = Answer(work, stream, id=secrets.token_hex(12), created=int(service.clock()))
    request.state.generated = Generated(answer.tally, body.user, body.metadata)
    try:
        if not work.stream:
            return _json(await while_connected(request.receive, answer.whole()))
        events = answer.events()
        first = await while_connected(request.receive, anext(events))
    except BaseException:
        await stream.aclose()
        raise
    return EventStream(first, events, stream.aclose)


def _model(served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "shoal",
        "max_model_len": served.context_length,
    }


def _json(value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status_code=status, headers=headers, media_type="application/json")


def _error(error: ApiError) -> Response:
    return _json(error.body(), error.status, error.headers)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return _error(error)

    @app.exception_handler(ShoalError)
    async def shoal_error(request: Request, error: ShoalError) -> Response:
        return _error(as_api_error(error))

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
        return _json(found.body(), error.status_code, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return _error(internal_error())
