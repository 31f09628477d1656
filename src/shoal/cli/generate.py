"""``shoal generate``: one prompt, streamed to standard output."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.loading import open_llm
from shoal.cli.options import DEFAULT_MODEL, Json, Model, takes_engine_options, takes_sampling_options
from shoal.config import EngineConfig
from shoal.core.params import SamplingParams
from shoal.errors import InvalidRequestError

if TYPE_CHECKING:
    from shoal.engine.llm import LLM
    from shoal.engine.prompts import Prompt


@takes_engine_options
@takes_sampling_options(temperature=0.0)
def generate(
    *,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; '-' reads it from standard input.")],
    engine: EngineConfig,
    sampling: dict[str, Any],
    model: Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="System message in front of the prompt.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the model's chat template.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Answer one prompt and stream the answer to standard output.

    The prompt is put as a chat message if the model has a chat template. Takes the most likely tokens unless a
    temperature is given.
    """
    if raw and system is not None:
        raise typer.BadParameter("a system message needs the chat template; leave out --raw", param_hint="--system")
    params = SamplingParams.from_mapping(sampling)
    text = sys.stdin.read() if prompt == "-" else prompt
    with open_llm(model, engine) as llm:
        _answer(llm, as_prompt(llm, text, system=system, raw=raw), params, as_json=as_json)


def as_prompt(llm: LLM, text: str, *, system: str | None, raw: bool) -> Prompt:
    """The text as a conversation if the model has a chat template and it is wanted."""
    if raw or llm.model.chat_template is None:
        if system is not None:
            raise InvalidRequestError("system", "this model has no chat template, so there is no place for it")
        return text
    messages = [{"role": "user", "content": text}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _answer(llm: LLM, prompt: Prompt, params: SamplingParams, *, as_json: bool) -> None:
    with llm.stream(prompt, params) as stream:
        for chunk in stream:
            if params.n == 1 and not as_json:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
        output = stream.output
    if as_json:
        from shoal.cli.records import output_record

        sys.stdout.write(json.dumps(output_record(output), ensure_ascii=False))
    elif params.n > 1:
        sys.stdout.write("\n".join(f"[{item.index + 1}] {item.text}" for item in output.completions))
    sys.stdout.write("\n")
    sys.stdout.flush()
