"""From a body to work: prompts encoded, parameters checked against the model, constraints compiled.

Pure but for the grammar cache, and safe in any thread. Everything that can be wrong with a request is found here,
before any of its prompts is queued. Errors name the field as the caller spelled it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

from shoal.core.grammar import GrammarKind, choose_constraint
from shoal.core.params import SamplingParams
from shoal.core.request import Request
from shoal.engine.request import TOO_LONG, EmptyResult
from shoal.errors import InvalidRequestError
from shoal.server.access.caller import Caller
from shoal.server.requests import ChatRequest, CompletionRequest, Generation, TokenizeRequest
from shoal.server.service import ServedModel
from shoal.server.work import ChatWork, CompletionWork
from shoal.tools.use import ToolUse, prepare_tools

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions
# A text's first so many characters per token of context, with twice the tokens that fit, show that all of it does not:
# reading a huge one to its end would take seconds.
_SAMPLE_CHARS = 8

_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "response_format",
    "regex",
    "grammar",
)


def prepare_completion(served: ServedModel, body: CompletionRequest, caller: Caller) -> CompletionWork:
    """The work of a completion request; ``InvalidRequestError`` names the field."""
    if body.suffix:
        raise InvalidRequestError("suffix", "is not supported: no model that can be served fills in the middle")
    n, candidates = _candidates(body)
    values = _common_values(served, body)
    values["n"] = candidates
    many = _is_list_of_prompts(body.prompt)
    if many and len(body.prompt) > 1:
        _check_total(served, len(body.prompt) * candidates)
    prompts = _prompts(served, body.prompt)
    echoes = tuple(_prompt_text(served, prompt) for prompt, _ in prompts) if body.echo else ()
    values["logprobs"] = body.logprobs
    if candidates > n and body.logprobs is None:
        values["logprobs"] = 0  # by which the best are chosen
    if body.echo and body.logprobs is not None:
        values["prompt_logprobs"] = body.logprobs
    requests = []
    for number, (_, ids) in enumerate(prompts):
        # A list of one is a list: its error says which item, as those of longer ones do.
        name = f"prompt[{number}]" if many else "prompt"
        wanted = body.max_tokens
        if wanted is None:
            # OpenAI's default, unless there is less room; a prompt without any is refused below.
            room = served.engine.limits.longest - len(ids)
            wanted = max(1, body.min_tokens or 0, min(DEFAULT_COMPLETION_TOKENS, room))
        with _renamed({"prompt": name, **({"n": "best_of"} if body.best_of is not None else {})}):
            requests.append(_resolve(served, body, caller, ids, {**values, "max_tokens": wanted}))
    return CompletionWork(
        served=served,
        requests=tuple(requests),
        n=n,
        candidates=candidates,
        logprobs=body.logprobs,
        echoes=echoes,
        **_manner(body),
    )


def prepare_chat(served: ServedModel, body: ChatRequest, caller: Caller) -> ChatWork:
    """The work of a chat request; ``InvalidRequestError`` names the field."""
    tools = _tools(served, body)
    ids = chat_ids(
        served,
        body.messages,
        tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )
    values = _common_values(served, body)
    values["n"] = n = body.n or 1
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs", "needs logprobs to be true")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    values["logprobs"] = logprobs
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            raise InvalidRequestError("max_completion_tokens", f"differs from max_tokens {body.max_tokens}; give one")
        values["max_tokens"] = body.max_completion_tokens
    elif body.max_tokens is not None:
        values["max_tokens"] = body.max_tokens
    _constrain_to_calls(served, tools, values)
    with _renamed({"prompt": "messages", "logprobs": "top_logprobs", "max_tokens": limit_name}):
        request = _resolve(served, body, caller, ids, values)
    return ChatWork(
        served=served, requests=(request,), n=n, candidates=n, logprobs=logprobs, tools=tools, **_manner(body)
    )


def tokenize_ids(served: ServedModel, body: TokenizeRequest) -> list[int]:
    """What ``/tokenize`` answers."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("prompt", "give either prompt or messages")
    if body.prompt is not None:
        for name in ("tools", "add_generation_prompt", "continue_final_message"):
            if getattr(body, name) is not None:
                raise InvalidRequestError(name, "goes with messages, not with prompt")
        return served.tokenizer.encode(body.prompt, add_special=body.add_special_tokens is not False)
    if body.add_special_tokens is not None:
        raise InvalidRequestError("add_special_tokens", "goes with prompt; a chat template places them itself")
    tools = prepare_tools(tools=body.tools, template=_template_source(served))
    return chat_ids(
        served,
        body.messages,
        tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )


def chat_ids(
    served: ServedModel,
    messages: object,
    tools: ToolUse,
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
) -> list[int]:
    """A conversation's tokens. ``add_generation_prompt``: None is true unless the last message is gone on with."""
    if served.template is None:
        raise InvalidRequestError("messages", "this model has no chat template; use /v1/completions")
    adapted, shown = tools.prompt(messages)
    if not adapted:
        raise InvalidRequestError("messages", "is empty; at least one message is needed")
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    segments = served.template.render(
        adapted,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools=shown,
    )
    _check_length(served, "".join(text for text, _ in segments), "messages")
    with _renamed({"prompt": "messages"}):
        return served.tokenizer.encode_segments(segments)


def is_light(body: CompletionRequest | ChatRequest, size: int) -> bool:
    """Whether preparing takes so little time that handing it to a thread would take longer.

    size: bytes of the body.
    """
    if size > 16_384 or body.regex is not None or body.grammar is not None or body.response_format is not None:
        return False
    return not (isinstance(body, ChatRequest) and body.tools)


def _resolve(
    served: ServedModel, body: Generation, caller: Caller, ids: Sequence[int], values: Mapping[str, Any]
) -> Request | EmptyResult:
    params = SamplingParams.from_mapping(values)
    deadline = None if body.deadline is None else served.engine.now() + body.deadline
    return served.client.resolve(
        ids,
        params,
        priority=caller.priority(body.priority),
        deadline=deadline,
        cache_salt=caller.cache_salt(body.cache_salt),
        tenant=caller.tenant,
        weight=caller.weight,
    )


def _common_values(served: ServedModel, body: Generation) -> dict[str, Any]:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options", "goes with stream only")
    for name in ("priority", "deadline"):
        if getattr(body, name) is not None and served.policy != name:
            raise InvalidRequestError(
                name, f"has no effect under this server's policy, {served.policy}; it is started with --policy {name}"
            )
    values = {name: getattr(body, name) for name in _SAME_NAME if getattr(body, name) is not None}
    if body.logit_bias is not None:
        values["logit_bias"] = _logit_bias(body.logit_bias)
    return values


def _logit_bias(value: object) -> dict[int, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError("logit_bias", "must be an object of token ids, as strings, and numbers")
    found: dict[int, Any] = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequestError("logit_bias", f"keys must be token ids, got {key[:40]!r}")
        if int(key) in found:
            raise InvalidRequestError("logit_bias", f"token {int(key)} stands there twice")
        found[int(key)] = bias
    return found


def _candidates(body: CompletionRequest) -> tuple[int, int]:
    """How many choices to show, and how many to make."""
    n = body.n or 1
    if body.best_of is None:
        return n, n
    if body.best_of < n:
        raise InvalidRequestError("best_of", f"{body.best_of} is less than n, {n}")
    if body.stream and body.best_of > n:
        raise InvalidRequestError("best_of", "cannot be streamed: the best are known at the end only")
    return n, body.best_of


def _prompts(served: ServedModel, prompt: object) -> list[tuple[str | list[int], list[int]]]:
    """The single prompts as given, with their tokens."""
    many = _is_list_of_prompts(prompt)
    items = prompt if _is_list_of_prompts(prompt) else [prompt]
    found: list[tuple[str | list[int], list[int]]] = []
    for number, item in enumerate(items):
        name = f"prompt[{number}]" if many else "prompt"
        if isinstance(item, str):
            _check_length(served, item, name)
            with _renamed({"prompt": name}):
                found.append((item, served.tokenizer.encode(item)))
        elif isinstance(item, list) and all(type(token) is int for token in item):
            found.append((item, item))
        elif isinstance(item, list):
            raise InvalidRequestError(name, "must hold token ids, which are integers")
        else:
            raise InvalidRequestError(
                name, "must be a string, a list of strings, a list of token ids or a list of lists of token ids"
            )
    return found


def _is_list_of_prompts(prompt: object) -> TypeGuard[list[Any]]:
    if not isinstance(prompt, list):
        return False
    if not prompt:
        raise InvalidRequestError("prompt", "is empty; at least one prompt is needed")
    return isinstance(prompt[0], (str, list))


def _prompt_text(served: ServedModel, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    for token in prompt:
        if not 0 <= token < served.tokenizer.vocab_size:
            raise InvalidRequestError("prompt", f"token id {token} is outside the vocabulary")
    return served.tokenizer.decode(prompt, skip_special=False)


def _check_length(served: ServedModel, text: str, name: str) -> None:
    """Refuse what is far too long without reading all of it."""
    limit = served.context_length
    sample = text[: _SAMPLE_CHARS * limit]
    if len(sample) == len(text):
        return
    with _renamed({"prompt": name}):
        tokens = len(served.tokenizer.encode(sample))
    if tokens > 2 * limit:
        raise InvalidRequestError(
            name, f"has more than {tokens} tokens, but the context length is {limit}; shorten it", code=TOO_LONG
        )


def _check_total(served: ServedModel, completions: int) -> None:
    limit = served.engine.limits.max_waiting
    if completions > limit:
        raise InvalidRequestError(
            "prompt", f"asks for {completions} completions at once, but the waiting queue holds {limit}; split it up"
        )


def _tools(served: ServedModel, body: ChatRequest) -> ToolUse:
    if not body.tools:
        for name in ("tool_choice", "parallel_tool_calls"):
            if getattr(body, name) is not None:
                raise InvalidRequestError(name, "goes with tools only")
    return prepare_tools(
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        template=_template_source(served),
    )


def _template_source(served: ServedModel) -> str | None:
    return None if served.template is None else served.template.source


def _constrain_to_calls(served: ServedModel, tools: ToolUse, values: dict[str, Any]) -> None:
    """Hold the text to calls that must be made, or to calls or an answer in the format that is asked for."""
    if not tools.shown:
        return
    check = served.engine.limits.check_grammar
    answer = choose_constraint(values.pop("response_format", None), values.get("regex"), values.get("grammar"))
    if answer is not None and (tools.constraint is not None or answer.kind is not GrammarKind.JSON_SCHEMA):
        raise InvalidRequestError(
            answer.field.partition(".")[0],
            "would leave no room for tool calls; set tool_choice to none, or make it two requests",
        )
    if answer is not None:
        for schema in (answer, *(tool.parameters for tool in tools.shown)):  # one by one, so that a bad one is named
            check(schema)
        values["grammar"] = tools.constraint_beside(answer)
    elif tools.constraint is not None:
        for schema in tools.schemas:
            check(schema)
        values["grammar"] = tools.constraint


def _manner(body: Generation) -> dict[str, bool]:
    options = body.stream_options
    return {
        "stream": bool(body.stream),
        "include_usage": options is not None and bool(options.include_usage),
        "timings": bool(body.timings),
    }


@contextmanager
def _renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about one field are about another one, as the caller spells it."""
    try:
        yield
    except InvalidRequestError as error:
        if error.field not in names:
            raise
        raise InvalidRequestError(names[error.field], error.message, code=error.code) from None
