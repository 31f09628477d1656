"""All options: defined once, resolved once, frozen.

``EngineConfig`` holds what a user may set. ``None`` and ``"auto"`` mean "decide for me"; whoever decides records the
reason, which ``shoal info`` prints. Nothing outside this module and the CLI reads the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError

PRECISIONS = ("auto", "native", "int4", "int8", "bf16", "f32")
KV_DTYPES = ("auto", "int8", "bf16", "f32")
ISAS = ("auto", "amx", "avx512", "avx2", "portable")
POLICIES = ("fcfs", "priority", "deadline", "static")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything about one engine.

    precision: "native" computes on the file's own 4- and 8-bit blocks with 8-bit activations in groups of 32; "int4"
        does so after rounding what is wider than 4 bits; "int8" rounds weights to 8 bits with one scale per output;
        "bf16" and "f32" expand the weights; "auto" is native for quantized files, else what the file's floats need.
    kv_dtype: "int8" keeps one scale per token and head; "auto" is as exact as the weights (see ``assembly``).
    isa: instruction set of the native kernels; "auto" takes the best this CPU has.
    threads: None is one per available core.
    block_size: tokens per KV block, a multiple of 16.
    kv_tokens: size of the KV cache in tokens; None derives it from free memory.
    context_length: longest sequence; None is the model's own.
    max_num_seqs: most sequences running at once.
    token_budget: most rows per step, shared by decodes and prefill chunks.
    policy: order of waiting and choice of victims. "priority", the default, is "fcfs" as long as nobody has a priority.
    priority_ageing: seconds of waiting that are worth a level of priority, under policy "priority"; 0 is never.
    max_waiting: most waiting requests before submit is refused.
    prefix_caching: reuse KV blocks of equal prefixes.
    """

    precision: str = "auto"
    kv_dtype: str = "auto"
    isa: str = "auto"
    threads: int | None = None
    block_size: int = 16
    kv_tokens: int | None = None
    context_length: int | None = None
    max_num_seqs: int = 64
    token_budget: int = 512
    policy: str = "priority"
    priority_ageing: int = 30
    max_waiting: int = 1024
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        _choice("precision", self.precision, PRECISIONS)
        _choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        _choice("isa", self.isa, ISAS)
        _choice("policy", self.policy, POLICIES)
        _integer("threads", self.threads, low=1, high=1024, optional=True)
        _integer("block_size", self.block_size, low=16, high=512)
        if self.block_size % 16:
            raise ConfigError("block_size", f"must be a multiple of 16, got {self.block_size}")
        _integer("kv_tokens", self.kv_tokens, low=16, high=2**31 - 1, optional=True)
        _integer("context_length", self.context_length, low=2, high=2**31 - 1, optional=True)
        _integer("max_num_seqs", self.max_num_seqs, low=1, high=4096)
        _integer("token_budget", self.token_budget, low=1, high=65536)
        _integer("priority_ageing", self.priority_ageing, low=0, high=10_000_000)
        _integer("max_waiting", self.max_waiting, low=1, high=10_000_000)
        if not isinstance(self.prefix_caching, bool):
            raise ConfigError("prefix_caching", f"must be true or false, got {self.prefix_caching!r}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build from option names; an unknown one is an error that lists the known ones."""
        known = {item.name for item in fields(cls)}
        for name in values:
            if name not in known:
                raise ConfigError(str(name), f"unknown option; known are {', '.join(sorted(known))}")
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of the server.

    host, port: where it listens; port 0 takes any that is free.
    served_name: the model's id in requests; None is the name that it was loaded by.
    max_body_bytes: most bytes of a request's body.
    keep_alive: seconds that an idle connection is kept.
    grace: seconds that running requests have to end when the server is told to.
    max_wait: longest that a request may be predicted to wait before it is begun, in seconds; 0 is without limit.
    request_timeout: seconds that a request may take from being queued to its end.
    body_timeout: seconds for a request's head, and again for its body, to arrive.
    write_timeout: seconds that an answer may wait for its reader to take more of it.
    step_timeout: seconds after which a step of the engine that has not ended is taken for stuck; 0 is never.
    max_connections: most connections at once.
    cors_origins: origins of web pages that may use the server; "*" is any.
    allowed_hosts: names by which it may be addressed beside the loopback's; "*" is any. On a loopback address, without
        keys, no others are served.
    share_cache: whether API keys may find each other's cached prefixes.
    otlp_endpoint: address of an OpenTelemetry collector that gets a trace of every request, by OTLP over HTTP.
    log_prompts: whether prompts and answers stand in the log.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str | None = None
    max_body_bytes: int = 4 * 2**20
    keep_alive: int = 75
    grace: int = 30
    max_wait: int = 600
    request_timeout: int = 3600
    body_timeout: int = 60
    write_timeout: int = 60
    step_timeout: int = 120
    max_connections: int = 4096
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    share_cache: bool = False
    otlp_endpoint: str | None = None
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError("host", f"must be a name or an address, got {self.host!r}")
        _integer("port", self.port, low=0, high=65535)
        if self.served_name is not None and (not isinstance(self.served_name, str) or not self.served_name.strip()):
            raise ConfigError("served_name", f"must be a name, got {self.served_name!r}")
        _integer("max_body_bytes", self.max_body_bytes, low=1024, high=2**40)
        _integer("keep_alive", self.keep_alive, low=0, high=86400)
        _integer("grace", self.grace, low=0, high=86400)
        _integer("max_wait", self.max_wait, low=0, high=604_800)
        for name in ("request_timeout", "body_timeout", "write_timeout"):
            _integer(name, getattr(self, name), low=1, high=604_800)
        _integer("step_timeout", self.step_timeout, low=0, high=604_800)
        _integer("max_connections", self.max_connections, low=1, high=1_000_000)
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s,]+", origin):
                raise ConfigError("cors_origins", f"must be like https://example.com, or '*', got {origin!r}")
        if self.otlp_endpoint is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", self.otlp_endpoint):
            raise ConfigError("otlp_endpoint", f"must be like http://localhost:4318, got {self.otlp_endpoint!r}")
        for host in self.allowed_hosts:
            if not re.fullmatch(r"\*|[A-Za-z0-9._:-]+", host):
                raise ConfigError("allowed_hosts", f"must be a name without scheme and path, got {host!r}")


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Where models live: $SHOAL_CACHE, else $XDG_CACHE_HOME/shoal, else ~/.cache/shoal."""
    env = os.environ if environment is None else environment
    if env.get("SHOAL_CACHE"):
        return Path(env["SHOAL_CACHE"])
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"]) / "shoal"
    return Path.home() / ".cache" / "shoal"


def _choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(field, f"must be one of {', '.join(allowed)}, got {value!r}")


def _integer(field: str, value: object, *, low: int, high: int, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(field, f"must be an integer, got {value!r}")
    if not low <= value <= high:
        raise ConfigError(field, f"must be in [{low}, {high}], got {value}")
