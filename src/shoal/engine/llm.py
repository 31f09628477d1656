"""``LLM``: the engine for a program that calls it and waits.

Prompts become requests in the caller's thread (encoding costs the engine nothing), the requests run on the engine
thread, and everything handed back is a frozen value. An ``LLM`` may be used from several threads at once.

A request that fails does not take the others' results away: ``generate`` gives it a completion with the finish reason
"error" and the error's text. It raises only when nothing of the call could be right: the call itself is wrong, or
every single prompt is invalid. ``chat`` and ``stream``, which have one request, raise.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from shoal.config import EngineConfig
from shoal.core.params import SamplingParams
from shoal.core.request import Request
from shoal.engine.chunk_stream import ChunkStream
from shoal.engine.client import AsyncClient
from shoal.engine.engine import EngineStats
from shoal.engine.feed import Event, Refused, run_all
from shoal.engine.outputs import RequestOutput
from shoal.engine.progress import ProgressBar
from shoal.engine.prompts import Message, Prompt, Prompts, is_chat_prompt, split_prompts
from shoal.engine.request import EmptyResult, resolve
from shoal.engine.start import start_engine
from shoal.errors import InvalidRequestError, RequestFailedError
from shoal.tools.prompting import adapt_messages

if TYPE_CHECKING:
    from shoal.assembly import LoadedModel

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model with its engine, ready to generate.

    model: a name that ``shoal models`` knows, or the path of a ``.gguf`` file.
    notify: called with a line of text when something takes time, such as fetching the model.
    options: as in ``EngineConfig``.
    """

    def __init__(
        self, model: str | Path = "smollm2", *, notify: Callable[[str], None] | None = None, **options: Any
    ) -> None:
        config = EngineConfig.from_mapping(options)
        # Imported here, so that a program or test that brings its own LoadedModel needs no native code.
        from shoal.assembly import load_model

        self._start(load_model(model, config, notify=notify))

    @classmethod
    def from_loaded(cls, loaded: LoadedModel) -> Self:
        """An ``LLM`` over a model that is loaded already; closing the ``LLM`` closes the model's backend."""
        llm = cls.__new__(cls)
        llm._start(loaded)
        return llm

    def _start(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._engine = start_engine(loaded)

    @property
    def model(self) -> LoadedModel:
        """The model: its name, tokenizer, chat template, context length and resolved configuration."""
        return self._loaded

    def generate(self, prompts: Prompts, params: Params = None, *, progress: bool = False) -> list[RequestOutput]:
        """Complete all prompts; results come in their order, a list even for one prompt.

        prompts: a string, a list of token ids or a list of chat messages, or a list of any of these mixed. A list
            is one prompt if its first item is a number or a message.
        params: one for all prompts, or one for each.
        progress: show a progress bar on standard error.

        An interrupt (Ctrl-C) aborts what is not done and leaves the ``LLM`` usable.
        """
        singles = split_prompts(prompts)
        outputs: dict[int, RequestOutput] = {}
        refusals: list[InvalidRequestError] = []
        with closing(self.events(singles, params)) as events, ProgressBar(len(singles), shown=progress) as bar:
            for event in events:
                if event.chunk is not None:
                    bar.add_tokens(len(event.chunk.token_ids))
                if event.output is not None:
                    outputs[event.position] = event.output
                    bar.add_done()
                if event.refusal is not None:
                    refusals.append(event.refusal)
        if refusals and len(refusals) == len(singles):
            raise refusals[0]
        return [outputs[position] for position in range(len(singles))]

    def events(self, prompts: Prompts, params: Params = None) -> Generator[Event, None, None]:
        """Like ``generate``, but gives everything the moment it happens: chunks, and outputs as they are done.

        Closing the generator aborts what is not done.
        """
        singles = split_prompts(prompts)
        every = _params_for_each(params, len(singles))
        return run_all(self._engine, map(self._request, singles, every), self._window())

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> RequestOutput:
        """Answer one conversation. Raises if it is invalid or fails."""
        _check_conversation(messages)
        output = self.generate(list(messages), params)[0]
        if output.error is not None:
            raise RequestFailedError(output.error)
        return output

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> ChunkStream:
        """Chunks of one prompt's completions as they come. Raises at once if the prompt is invalid."""
        singles = split_prompts(prompt)
        if len(singles) != 1:
            raise InvalidRequestError("prompt", f"stream takes one prompt, got {len(singles)}; use generate or events")
        request = self._request(singles[0], _params_for_each(params, 1)[0])
        if isinstance(request, Refused):
            raise request.error
        return ChunkStream(self._engine, request)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """A prompt's token ids, as ``generate`` would use them."""
        return tuple(self._encode(prompt))

    def client(self) -> AsyncClient:
        """A client of this engine for one asyncio event loop."""
        return AsyncClient(self._engine)

    def stats(self) -> EngineStats:
        """What the engine did since it was started."""
        return self._engine.stats

    def close(self) -> None:
        """Abort whatever runs, end the engine thread, free the model. Idempotent."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _window(self) -> int:
        """Enough for a full batch to run and another to wait, which is all that any policy can make use of."""
        return 2 * self._loaded.config.max_num_seqs

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request | EmptyResult | Refused:
        ids: tuple[int, ...] = ()
        try:
            ids = self.encode(prompt)
            return resolve(self._engine.new_request_id(), ids, params, self._engine.limits)
        except InvalidRequestError as error:
            return Refused(ids, params.n, error)

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            return self._loaded.tokenizer.encode(prompt)
        if is_chat_prompt(prompt):
            template = self._loaded.chat_template
            if template is None:
                raise InvalidRequestError(
                    "messages", "this model has no chat template; give the prompt as text or token ids"
                )
            return self._loaded.tokenizer.encode_segments(template.render(adapt_messages(prompt, template.source)))
        return cast(Sequence[int], prompt)  # what the items really are is checked by resolve


def _params_for_each(params: Params, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    every = list(params) if isinstance(params, Sequence) and not isinstance(params, str) else [params]
    for item in every:
        if not isinstance(item, SamplingParams):
            raise InvalidRequestError("params", f"must be SamplingParams or a list of them, got {type(item).__name__}")
    if len(every) != count:
        raise InvalidRequestError("params", f"one for all prompts or one for each: {len(every)} for {count} prompts")
    return every


def _check_conversation(messages: object) -> None:
    if not isinstance(messages, Sequence) or not is_chat_prompt(messages):
        raise InvalidRequestError(
            "messages", "must be a non-empty list of messages such as {'role': 'user', 'content': 'Hello'}"
        )
