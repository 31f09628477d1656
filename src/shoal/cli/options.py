"""Options that several commands take: the model, the engine's options, the sampling parameters.

A command declares one parameter, ``engine: EngineConfig`` or ``sampling: dict[str, Any]``, and a decorator puts the
flags in its place. So each flag, with its help, stands here once, and a wrong value is wrong usage that names the flag.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.config import ISAS, KV_DTYPES, POLICIES, PRECISIONS, EngineConfig
from shoal.core.params import SamplingParams
from shoal.errors import ConfigError, InvalidRequestError

DEFAULT_MODEL = "smollm2"

Model = Annotated[
    str, typer.Option("--model", "-m", metavar="NAME|FILE", help="A model's name, or the path of a .gguf file.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]

Command = Callable[..., None]

_ENGINE_PANEL = "Engine"
_SAMPLING_PANEL = "Sampling"


def _engine(kind: Any, help_text: str, *, metavar: str | None = None, flag: str | None = None) -> Any:
    names = () if flag is None else (flag,)
    return Annotated[kind, typer.Option(*names, help=help_text, metavar=metavar, rich_help_panel=_ENGINE_PANEL)]


def _sampling(kind: Any, help_text: str, *, metavar: str | None = None) -> Any:
    return Annotated[kind, typer.Option(help=help_text, metavar=metavar, rich_help_panel=_SAMPLING_PANEL)]


_ENGINE_FLAGS: Mapping[str, Any] = {
    "precision": _engine(str, "Arithmetic of the weights.", metavar="|".join(PRECISIONS)),
    "kv_dtype": _engine(str, "Type of the KV cache.", metavar="|".join(KV_DTYPES)),
    "isa": _engine(str, "Instruction set of the kernels.", metavar="|".join(ISAS)),
    "threads": _engine(int | None, "Threads that compute; default: one per available core."),
    "block_size": _engine(int, "Tokens per KV block."),
    "kv_tokens": _engine(int | None, "Size of the KV cache in tokens; default: from free memory."),
    "context_length": _engine(int | None, "Longest sequence in tokens; default: the model's own."),
    "max_num_seqs": _engine(int, "Most sequences running at once."),
    "token_budget": _engine(int, "Most rows per step, shared by decodes and prefill chunks."),
    "policy": _engine(str, "Order of waiting requests and choice of victims.", metavar="|".join(POLICIES)),
    "priority_ageing": _engine(int, "Seconds of waiting that are worth a level of priority; 0: never."),
    "max_waiting": _engine(int, "Most waiting requests."),
    "prefix_caching": _engine(
        bool, "Reuse the KV blocks of equal prefixes.", flag="--prefix-caching/--no-prefix-caching"
    ),
}

_SAMPLING_FLAGS: Mapping[str, Any] = {
    "max_tokens": _sampling(int | None, "Most tokens to generate; none given: up to the context's end."),
    "min_tokens": _sampling(int | None, "No end before so many tokens."),
    "temperature": _sampling(float | None, "0 takes the most likely token."),
    "top_k": _sampling(int | None, "Keep the k most likely tokens; 0 keeps all."),
    "top_p": _sampling(float | None, "Keep the smallest set of tokens that reaches this probability."),
    "min_p": _sampling(float | None, "Drop tokens less likely than this fraction of the most likely one."),
    "repetition_penalty": _sampling(float | None, "Above 1: tokens seen before become less likely."),
    "presence_penalty": _sampling(float | None, "Subtracted once from tokens in the output."),
    "frequency_penalty": _sampling(float | None, "Subtracted per occurrence from tokens in the output."),
    "seed": _sampling(int | None, "Same seed, same tokens; default: a fresh one."),
    "stop": _sampling(list[str] | None, "Text that ends the output; may be repeated."),
    "ignore_eos": _sampling(bool | None, "Do not stop at the end-of-sequence token."),
    "logprobs": _sampling(int | None, "Log-probabilities: of the chosen token and so many alternatives."),
    "prompt_logprobs": _sampling(int | None, "The same for the prompt's tokens."),
    "n": _sampling(int | None, "Completions per prompt."),
    "json_schema": _sampling(Path | None, "File of a JSON schema that the text must fit.", metavar="FILE"),
    "regex": _sampling(str | None, "Regular expression that the whole text must match."),
    "grammar": _sampling(Path | None, "File of a grammar, in Lark's syntax, for the text.", metavar="FILE"),
}


def takes_engine_options(command: Command) -> Command:
    """Put the engine's flags in the place of the command's ``engine`` parameter."""
    return takes_some_engine_options(*_ENGINE_FLAGS)(command)


def takes_some_engine_options(*names: str) -> Callable[[Command], Command]:
    """The same with these flags only; the other options have their defaults."""
    defaults = {item.name: item.default for item in fields(EngineConfig)}
    flags = {name: (_ENGINE_FLAGS[name], defaults[name]) for name in names}
    return lambda command: _in_place_of("engine", flags, command, _engine_config)


def takes_sampling_options(*, without: tuple[str, ...] = (), **defaults: Any) -> Callable[[Command], Command]:
    """Put the sampling flags in the place of the command's ``sampling`` parameter, which gets those that are set.

    ``defaults`` are this command's; a flag without one is left to ``SamplingParams``.
    """
    flags = {
        name: (annotation, defaults.get(name)) for name, annotation in _SAMPLING_FLAGS.items() if name not in without
    }
    return lambda command: _in_place_of("sampling", flags, command, _sampling_values)


def _in_place_of(
    name: str, flags: Mapping[str, tuple[Any, Any]], command: Command, make: Callable[[dict[str, Any]], Any]
) -> Command:
    signature = inspect.signature(command, eval_str=True)
    parameters = [item for item in signature.parameters.values() if item.name != name]
    for flag, (annotation, default) in flags.items():
        parameters.append(
            inspect.Parameter(flag, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        )

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        values = {flag: arguments.pop(flag) for flag in flags}
        command(**arguments, **{name: make(values)})

    parameters = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in parameters]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run


def _engine_config(values: dict[str, Any]) -> EngineConfig:
    try:
        return EngineConfig.from_mapping(values)
    except ConfigError as error:
        raise bad_flag(error.field, error.message) from None


def _sampling_values(values: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in values.items() if value is not None}
    if (schema := given.pop("json_schema", None)) is not None:
        given["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "file", "schema": _json_file(schema)},
        }
    if (grammar := given.pop("grammar", None)) is not None:
        given["grammar"] = _text_file("grammar", grammar)
    try:
        SamplingParams.from_mapping(given)
    except InvalidRequestError as error:
        raise bad_flag(error.field, error.message) from None
    return given


def _json_file(path: Path) -> Any:
    try:
        return json.loads(_text_file("json_schema", path))
    except (ValueError, RecursionError) as error:
        raise bad_flag("json_schema", f"{path} is not JSON: {error}") from None


def _text_file(field: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise bad_flag(field, f"cannot read {path}: {error}") from None


def bad_flag(field: str, message: str) -> typer.BadParameter:
    """Wrong usage of the flag that sets a field."""
    flag = "json_schema" if field.startswith("response_format") else field
    return typer.BadParameter(message, param_hint=f"--{flag.replace('_', '-')}")
