"""What the bodies of requests may hold: OpenAI's parameters, and Shoal's own.

Every field here has an effect, or is accepted only at the one value that asks for nothing. Simple types are checked
here; what a value means, and whether it fits the model, is checked by who uses it (``SamplingParams``, ``text``,
``tools``), whose errors name the same fields. Null is as good as not given.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from shoal.core.params import MAX_LOGPROBS, MAX_N, MAX_TOKENS_LIMIT
from shoal.server.shapes import LogitBias, Messages, Prompt, ResponseFormat, Stop, ToolChoice, Tools

Number = Annotated[float, Field(allow_inf_nan=False)]
TokenIds = Annotated[list[int], Field(max_length=256)]


class Body(BaseModel):
    """A request's body: unknown fields are errors, and no value is converted into another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class StreamOptions(Body):
    """What a stream tells beside its text."""

    include_usage: bool | None = Field(None, description="A last chunk, without choices, that holds the usage.")
    include_obfuscation: Literal[False] | None = Field(None, description="Padding of chunks is not offered.")


class Generation(Body):
    """What both endpoints take."""

    model: str | None = Field(None, description="Id of the served model; not given: that model.")
    stream: bool | None = Field(None, description="Server-sent events instead of one answer.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    n: int | None = Field(None, ge=1, le=MAX_N, description="Choices per prompt, which is computed once.")
    temperature: Number | None = Field(None, ge=0, le=100, description="0 takes the most likely token; default 1.")
    top_p: Number | None = Field(None, gt=0, le=1, description="Smallest set of tokens that reaches this probability.")
    top_k: int | None = Field(None, ge=0, le=2**31 - 1, description="The k most likely tokens; 0 is all. Shoal's own.")
    min_p: Number | None = Field(None, ge=0, le=1, description="Least part of the best token's probability. Own.")
    presence_penalty: Number | None = Field(None, ge=-100, le=100)
    frequency_penalty: Number | None = Field(None, ge=-100, le=100)
    repetition_penalty: Number | None = Field(None, gt=0, le=100, description="Of prompt and answer. Shoal's own.")
    logit_bias: LogitBias = Field(None, description="Token ids, as strings, to what is added to their logits.")
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1, description="Same seed, same tokens, in any company.")
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS_LIMIT)
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS_LIMIT, description="No end before so many. Shoal's own.")
    stop: Stop = Field(None, description="A text, or up to 64, that end the answer and are not part of it.")
    stop_token_ids: TokenIds | None = Field(None, description="Tokens that end the answer. Shoal's own.")
    ignore_eos: bool | None = Field(None, description="The end-of-sequence token is like any other. Shoal's own.")
    response_format: ResponseFormat = Field(None, description="Text, any JSON object, or JSON of a schema.")
    regex: str | None = Field(None, description="An expression that the whole text matches. Shoal's own.")
    grammar: str | None = Field(None, description="A grammar, in Lark's syntax, of the text. Shoal's own.")
    user: str | None = Field(None, max_length=512, description="Your user's id: it stands in the server's log.")
    metadata: dict[str, str] | None = Field(None, max_length=16, description="Stands in the server's log.")
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1, description="Higher first; policy priority only.")
    deadline: Number | None = Field(None, gt=0, le=1e9, description="Seconds to be done in; policy deadline only.")
    cache_salt: str | None = Field(None, min_length=1, max_length=512, description="Shares prefixes with equals only.")
    timings: bool | None = Field(None, description="Adds a timings object to the answer. Shoal's own.")


class CompletionRequest(Generation):
    """``POST /v1/completions``: a text is continued as it is."""

    prompt: Prompt = Field(description="A text, a list of texts, token ids, or a list of lists of token ids.")
    best_of: int | None = Field(None, ge=1, le=MAX_N, description="Makes so many and returns the n most likely.")
    echo: bool | None = Field(None, description="The prompt in front of the text, its tokens among the logprobs.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Alternatives to each token, and its own.")
    suffix: str | None = Field(None, description="Refused: no model here fills in the middle.")


class ChatRequest(Generation):
    """``POST /v1/chat/completions``: a conversation is answered."""

    messages: Messages = Field(description="The conversation.")
    max_completion_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS_LIMIT, description="The same as max_tokens.")
    logprobs: bool | None = Field(None, description="Log-probabilities of the answer's tokens.")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="And so many alternatives to each.")
    tools: Tools = Field(None, description="Functions that the model may call.")
    tool_choice: ToolChoice = Field(None, description="Whether it must, and which.")
    parallel_tool_calls: bool | None = Field(None, description="Whether it may call several.")
    add_generation_prompt: bool | None = Field(None, description="The assistant's turn is opened; default true.")
    continue_final_message: bool | None = Field(None, description="The last message, the assistant's, is gone on with.")
    modalities: list[Literal["text"]] | None = Field(None, min_length=1, max_length=1, description="Text only.")
    store: Literal[False] | None = Field(None, description="Nothing is stored.")
    service_tier: Literal["auto", "default"] | None = Field(None, description="There is one tier.")


class TokenizeRequest(Body):
    """``POST /tokenize``: a text, or a conversation as the model would see it."""

    model: str | None = Field(None, description="Id of the served model; not given: that model.")
    prompt: str | None = Field(None, description="A text. Either this or messages.")
    messages: Annotated[Any, WithJsonSchema({"type": ["array", "null"]})] = Field(None, description="A conversation.")
    tools: Tools = Field(None, description="With messages.")
    add_special_tokens: bool | None = Field(None, description="With prompt: begin and end tokens; default true.")
    add_generation_prompt: bool | None = Field(None, description="With messages; default true.")
    continue_final_message: bool | None = Field(None, description="With messages.")
    return_token_strs: bool | None = Field(None, description="Adds each token's text.")


class DetokenizeRequest(Body):
    """``POST /detokenize``: token ids to text."""

    model: str | None = Field(None, description="Id of the served model; not given: that model.")
    tokens: list[int] = Field(description="Token ids.")


# What OpenAI's API and others' have and Shoal does not. A null asks for nothing and is accepted.
REFUSED = {
    "audio": "only text is generated",
    "best_of": "is a parameter of /v1/completions only",
    "chat_template": "the model's own template is used",
    "chat_template_kwargs": "the model's own template is used as it is",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_choice": "use regex",
    "guided_grammar": "use grammar",
    "guided_json": "use response_format",
    "guided_regex": "use regex",
    "length_penalty": "beam search is not offered",
    "max_output_tokens": "use max_tokens",
    "moderation": "is not offered",
    "prediction": "predicted outputs are not offered",
    "prompt_cache_key": "equal prefixes are shared without a key; use cache_salt to keep them apart",
    "prompt_cache_retention": "prefixes are kept as long as there is room",
    "prompt_logprobs": "use echo with logprobs at /v1/completions",
    "reasoning_effort": "is not offered",
    "safety_identifier": "use user",
    "truncate_prompt_tokens": "prompts are never cut; shorten it",
    "use_beam_search": "beam search is not offered",
    "verbosity": "is not offered",
    "web_search_options": "is not offered",
}
