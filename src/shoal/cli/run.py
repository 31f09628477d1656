"""``shoal run``: answer a file of prompts, many at once, and say how it went."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from shoal.cli.console import FAILED, INTERRUPTED, complain, make_console, note
from shoal.cli.loading import open_llm
from shoal.cli.options import DEFAULT_MODEL, Model, takes_engine_options, takes_sampling_options
from shoal.cli.prompt_file import PromptFileError, PromptLine, read_prompts
from shoal.config import EngineConfig
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.cli.run_display import Display
    from shoal.engine.llm import LLM
    from shoal.engine.outputs import RequestOutput


@takes_engine_options
@takes_sampling_options(max_tokens=256, temperature=0.0)
def run(
    *,
    engine: EngineConfig,
    sampling: dict[str, Any],
    file: Annotated[
        str | None, typer.Argument(metavar="FILE.jsonl", help="The prompts; '-' or nothing reads standard input.")
    ] = None,
    model: Model = DEFAULT_MODEL,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE.jsonl", help="Write one JSON line per answer; '-' is standard output."
        ),
    ] = None,
    stream: Annotated[int, typer.Option(min=0, help="How many of the answers are shown live.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on standard output.")] = False,
) -> None:
    """Answer a file of prompts, many at once.

    Each line is a JSON object with "messages" (a conversation) or "prompt" (plain text, continued as it is), and
    optionally "id" and any sampling parameters by name (max_tokens, temperature, seed, stop ...), which go before the
    options given here. Answers are written in the order of the prompts. Exit status 1 if a request failed.
    """
    if output == "-" and as_json:
        raise typer.BadParameter("the answers go to standard output already (--output -)", param_hint="--json")
    lines = _read(file, sampling)
    with _open_output(output) as sink, open_llm(model, engine) as llm:
        exit_status = _run(llm, lines, _OrderedWriter(sink, lines), stream, as_json=as_json, to_stdout=output != "-")
    if exit_status:
        raise typer.Exit(exit_status)


def _read(file: str | None, defaults: dict[str, Any]) -> list[PromptLine]:
    if file is None and sys.stdin.isatty():
        raise typer.BadParameter("give a file of prompts, or pipe one in", param_hint="FILE.jsonl")
    try:
        if file is None or file == "-":
            return read_prompts(sys.stdin, "standard input", defaults)
        with Path(file).open(encoding="utf-8") as lines:
            return read_prompts(lines, file, defaults)
    except PromptFileError as error:
        for problem in error.problems:
            complain(problem)
        raise typer.Exit(FAILED) from None
    except UnicodeDecodeError as error:
        raise ConfigError("FILE.jsonl", f"{file or 'standard input'} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise ConfigError("FILE.jsonl", f"cannot read {file}: {error.strerror}") from None


def _open_output(output: str | None) -> AbstractContextManager[TextIO | None]:
    if output is None or output == "-":
        return nullcontext(None if output is None else sys.stdout)
    try:
        return Path(output).open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError("output", f"cannot write {output}: {error.strerror}") from None


def _run(
    llm: LLM, lines: Sequence[PromptLine], writer: _OrderedWriter, stream: int, *, as_json: bool, to_stdout: bool
) -> int:
    from shoal.cli.run_display import make_display
    from shoal.cli.run_summary import Summary, summary_record, summary_table

    outputs: list[RequestOutput] = []
    interrupted = False
    started = time.monotonic()
    display = make_display(make_console(), lines, stream)
    try:
        _answer_all(llm, lines, writer, display, outputs)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        writer.finish()
    summary = Summary.of(outputs, len(lines), llm.stats(), time.monotonic() - started)
    if as_json:
        sys.stdout.write(json.dumps(summary_record(summary)) + "\n")
    else:
        make_console(stderr=not to_stdout).print(summary_table(summary))
    if interrupted:
        note(f"interrupted: {len(outputs)} of {len(lines)} requests were done")
        return INTERRUPTED
    for line, output in zip(lines, writer.outputs(), strict=True):
        if output is not None and output.error is not None:
            complain(f"request {line.id}: {output.error}")
    return FAILED if summary.failed else 0


def _answer_all(
    llm: LLM, lines: Sequence[PromptLine], writer: _OrderedWriter, display: Display, outputs: list[RequestOutput]
) -> None:
    prompts = [line.prompt for line in lines]
    with closing(llm.events(prompts, [line.params for line in lines])) as events, display:
        for event in events:
            if event.chunk is not None:
                display.add_chunk(event.position, event.chunk)
            if event.output is not None:
                outputs.append(event.output)
                writer.add(event.position, event.output)
                display.add_output(event.position, event.output)


class _OrderedWriter:
    """Writes answers in the order of the prompts, each as soon as those before it are written."""

    def __init__(self, sink: TextIO | None, lines: Sequence[PromptLine]) -> None:
        self._sink = sink
        self._lines = lines
        self._outputs: list[RequestOutput | None] = [None] * len(lines)
        self._next = 0

    def add(self, position: int, output: RequestOutput) -> None:
        self._outputs[position] = output
        while self._next < len(self._outputs) and self._outputs[self._next] is not None:
            self._write_next()

    def finish(self) -> None:
        """Write what is still held back; after an interrupt the unfinished ones are left out."""
        while self._next < len(self._outputs):
            self._write_next()

    def outputs(self) -> Sequence[RequestOutput | None]:
        return self._outputs

    def _write_next(self) -> None:
        # Counted first: an interrupt in between must not write a line twice.
        position, self._next = self._next, self._next + 1
        output = self._outputs[position]
        if self._sink is None or output is None:
            return
        from shoal.cli.records import output_record

        record = {"id": self._lines[position].id, **output_record(output)}
        self._sink.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._sink.flush()
