"""``shoal serve``: the OpenAI-compatible server."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.console import note
from shoal.cli.loading import fetch_if_missing
from shoal.cli.options import DEFAULT_MODEL, Model, bad_flag, takes_engine_options
from shoal.cli.service_manager import tell_ready
from shoal.config import EngineConfig, ServerConfig
from shoal.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from shoal.assembly import LoadedModel
    from shoal.server.access.api_key import ApiKey
    from shoal.server.service import ServedModel

_PANEL = "Server"
_DEFAULTS = ServerConfig()
# What of the options limits a client, in the order in which it will meet them.
_LIMITS = ("context_length", "max_num_seqs", "token_budget", "kv_tokens", "max_waiting")
_ARITHMETIC = ("precision", "kv_dtype", "isa", "threads")
_FLAGS = {"cors_origins": "cors_origin", "allowed_hosts": "allowed_host"}  # where an option's name is another
WRONG_USAGE = 2


def _option(help_text: str, *flags: str) -> Any:
    return typer.Option(*flags, help=help_text, rich_help_panel=_PANEL)


@takes_engine_options
def serve(
    *,
    engine: EngineConfig,
    model: Model = DEFAULT_MODEL,
    host: Annotated[
        str, _option("Address to listen on; the default is reached from this machine only.")
    ] = _DEFAULTS.host,
    port: Annotated[int, _option("Port to listen on; 0 takes any that is free.")] = _DEFAULTS.port,
    served_name: Annotated[str | None, _option("The model's id in requests; default: its name here.")] = None,
    max_body_bytes: Annotated[int, _option("Most bytes of a request's body.")] = _DEFAULTS.max_body_bytes,
    keep_alive: Annotated[int, _option("Seconds that an idle connection is kept.")] = _DEFAULTS.keep_alive,
    grace: Annotated[int, _option("Seconds that running requests have to end at a signal.")] = _DEFAULTS.grace,
    api_keys: Annotated[
        Path | None,
        _option(
            "TOML file of API keys, with names, priorities and limits (see docs/operations.md). Keys may also stand in "
            "SHOAL_API_KEYS, as name:secret,name:secret. Without any, everybody may use the server."
        ),
    ] = None,
    share_cache: Annotated[
        bool,
        _option(
            "Let API keys find each other's cached prefixes. Who measures times can then tell what others asked.",
            "--share-cache/--no-share-cache",
        ),
    ] = _DEFAULTS.share_cache,
    max_wait: Annotated[
        int,
        _option("Refuse a request (429) that would wait for more seconds than this; 0 is without limit."),
    ] = _DEFAULTS.max_wait,
    request_timeout: Annotated[
        int, _option("Seconds that a request may take, waiting included.")
    ] = _DEFAULTS.request_timeout,
    body_timeout: Annotated[
        int, _option("Seconds for a request's headers to arrive, and again for its body.")
    ] = _DEFAULTS.body_timeout,
    write_timeout: Annotated[
        int, _option("Seconds that a reader may take nothing of its answer before the connection is cut.")
    ] = _DEFAULTS.write_timeout,
    step_timeout: Annotated[
        int,
        _option("End the process when one step of the engine has taken so many seconds; 0 is never."),
    ] = _DEFAULTS.step_timeout,
    max_connections: Annotated[int, _option("Most connections at once.")] = _DEFAULTS.max_connections,
    cors_origin: Annotated[
        list[str] | None,
        _option("Let web pages of this origin use the server, as https://example.com; may be repeated; '*' is any."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        _option(
            "Name by which the server may be addressed, beside the loopback's; may be repeated; '*' is any. "
            "Checked when it listens on a loopback address without keys, or when given."
        ),
    ] = None,
    log_requests: Annotated[
        bool,
        _option("A line of JSON on standard error for every request; no prompts.", "--log-requests/--no-log-requests"),
    ] = True,
    log_prompts: Annotated[
        bool, _option("Prompts and answers in those lines too.", "--log-prompts/--no-log-prompts")
    ] = _DEFAULTS.log_prompts,
    otlp_endpoint: Annotated[
        str | None,
        _option(
            "Send OpenTelemetry traces to this collector, as http://localhost:4318; needs the extra shoal[otel]. No "
            "prompts are in them."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Tell the address and the options as a line of JSON on standard output.")
    ] = False,
) -> None:
    """Serve a model over the OpenAI-compatible HTTP API.

    Requests of all clients are batched together. A signal ends the server when what runs is done, or when the grace
    period is over; a second one ends it at once.
    """
    from shoal.assembly import load_model
    from shoal.server.hosts import LOOPBACK
    from shoal.server.run import serve as run_server

    try:
        config = ServerConfig(
            host=host,
            port=port,
            served_name=served_name,
            max_body_bytes=max_body_bytes,
            keep_alive=keep_alive,
            grace=grace,
            max_wait=max_wait,
            request_timeout=request_timeout,
            body_timeout=body_timeout,
            write_timeout=write_timeout,
            step_timeout=step_timeout,
            max_connections=max_connections,
            cors_origins=tuple(cors_origin or ()),
            allowed_hosts=tuple(allowed_host or ()),
            share_cache=share_cache,
            otlp_endpoint=otlp_endpoint,
            log_prompts=log_prompts,
        )
        keys = _keys(api_keys, os.environ.get("SHOAL_API_KEYS", ""), engine.policy)
    except ConfigError as error:
        raise bad_flag(_FLAGS.get(error.field, error.field), error.message) from None
    if log_prompts and not log_requests:
        raise bad_flag("log_prompts", "goes with --log-requests only")
    _log(log_requests=log_requests)

    def load() -> LoadedModel:
        fetch_if_missing(model)
        return load_model(model, engine, notify=note)

    def ready(loaded: LoadedModel, served: ServedModel, address: str) -> None:
        if not keys and host not in LOOPBACK:
            note(f"warning: everybody who can reach {host} may use this server; --api-keys says who may")
        if as_json:
            sys.stdout.write(json.dumps(_record(loaded, served, address)) + "\n")
            sys.stdout.flush()
        else:
            note(_banner(loaded, served, address, config))
        tell_ready(os.environ)

    try:
        run_server(config, load, ready, keys)
    except (ConfigError, ModelError) as error:
        # The server never was: that is wrong usage, as a wrong flag is.
        note(f"error: {error}")
        raise typer.Exit(WRONG_USAGE) from None


def _keys(path: Path | None, line: str, policy: str) -> tuple[ApiKey, ...]:
    from shoal.server.access.key_sources import distinct, parse_keys, read_keys

    keys = distinct((*(read_keys(path) if path is not None else ()), *parse_keys(line)))
    if policy != "priority" and any(key.priority or key.highest or key.weight != 1 for key in keys):
        raise ConfigError("api_keys", f"priorities and weights have no effect under --policy {policy}; leave it out")
    return keys


def _log(*, log_requests: bool) -> None:
    """Warnings of the server and its libraries, and the lines about requests, on standard error."""
    from shoal.server.json_log import JsonFormatter

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("shoal.requests").setLevel(logging.INFO if log_requests else logging.WARNING)


def _record(loaded: LoadedModel, served: ServedModel, address: str) -> dict[str, object]:
    options = [{"name": name, "value": value, "reason": reason} for name, value, reason in loaded.decisions]
    return {"address": address, "model": served.name, "path": str(loaded.path), "options": options}


def _banner(loaded: LoadedModel, served: ServedModel, address: str, config: ServerConfig) -> str:
    decisions = {item.name: item for item in loaded.decisions}
    rows = [(name, decisions[name].value, decisions[name].reason) for name in (*_ARITHMETIC, *_LIMITS)]
    rows.append(("max_body_bytes", str(config.max_body_bytes), "--max-body-bytes"))
    names, values = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    table = "\n".join(f"  {name:<{names}}  {value:>{values}}  {why}" for name, value, why in rows)
    path, body = "chat/completions", {"messages": [{"role": "user", "content": "Name three rivers."}], "temperature": 0}
    if served.template is None:
        path, body = "completions", {"prompt": "Three rivers are", "temperature": 0}
    return f"""
Shoal serves {served.name} at {address}/v1  (its description: {address}/docs)

{table}

Try it:
  curl {address}/v1/{path} -H 'Content-Type: application/json' \\
    -d '{json.dumps(body)}'

Ctrl-C ends it.
"""
