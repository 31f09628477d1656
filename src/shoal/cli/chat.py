"""``shoal chat``: a conversation in the terminal.

The conversation itself is a value (``Conversation``) that knows how to fit a context; the loop around it reads lines,
streams answers and obeys the slash commands. Ctrl-C stops an answer, which is kept as far as it came; Ctrl-D leaves.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from shoal.cli.console import complain, note
from shoal.cli.loading import open_llm
from shoal.cli.options import DEFAULT_MODEL, Model, takes_engine_options, takes_sampling_options
from shoal.config import EngineConfig
from shoal.core.params import SamplingParams
from shoal.errors import EngineError, InvalidRequestError, ShoalError

if TYPE_CHECKING:
    from shoal.engine.llm import LLM

# Room for an answer that must be left when max_tokens does not say how much is needed.
_LEAST_ROOM = 256

_HELP = """/help           this list
/reset          forget the conversation, keep the system message
/system TEXT    set the system message (without a text: remove it)
/undo           take back the last question and its answer
/exit           leave, as does Ctrl-D; Ctrl-C stops an answer"""


@takes_engine_options
@takes_sampling_options(without=("n", "logprobs"), temperature=0.3, top_p=0.9)
def chat(
    *,
    engine: EngineConfig,
    sampling: dict[str, Any],
    model: Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
) -> None:
    """Talk with a model. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves."""
    params = SamplingParams.from_mapping(sampling)
    with open_llm(model, engine) as llm:
        if llm.model.chat_template is None:
            raise InvalidRequestError("model", f"{llm.model.name} has no chat template; use `shoal generate --raw`")
        if sys.stdin.isatty():
            _enable_line_editing()
            note(f"{llm.model.name}; /help lists the commands, Ctrl-D leaves")
        ChatLoop(llm, params, Conversation(system=system), sys.stdout, _read_line).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A system message and turns, each a question and its answer; the last may be unanswered."""

    system: str | None = None
    turns: tuple[tuple[str, str | None], ...] = ()

    def messages(self) -> list[dict[str, str]]:
        """As the chat template wants it."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for question, answer in self.turns:
            messages.append({"role": "user", "content": question})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return messages

    def ask(self, question: str) -> Conversation:
        """With one more question."""
        return replace(self, turns=(*self.turns, (question, None)))

    def answer(self, text: str) -> Conversation:
        """With the last question answered."""
        return replace(self, turns=(*self.turns[:-1], (self.turns[-1][0], text)))

    def undo(self) -> Conversation:
        """Without the last turn."""
        return replace(self, turns=self.turns[:-1])

    def fit(self, measure: Callable[[list[dict[str, str]]], int], limit: int) -> Conversation:
        """Without the oldest turns that must go for the prompt to have at most ``limit`` tokens; the last one stays."""
        shorter = self
        while len(shorter.turns) > 1 and measure(shorter.messages()) > limit:
            shorter = replace(shorter, turns=shorter.turns[1:])
        return shorter


class ChatLoop:
    """Reads lines and answers them until the end of input or /exit."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        conversation: Conversation,
        out: TextIO,
        read_line: Callable[[], str],
    ) -> None:
        self._llm = llm
        self._params = params
        self._out = out
        self._read_line = read_line
        self.conversation = conversation

    def run(self) -> None:
        """Until the end."""
        for line in self._lines():
            if not line:
                continue
            if line.startswith("/"):
                if line == "/exit":
                    return
                self._obey(line)
            else:
                self._reply(line)

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                yield self._read_line().strip()
            except EOFError:
                self._out.write("\n")
                return
            except KeyboardInterrupt:  # while typing: a fresh line, as in a shell
                self._out.write("\n")

    def _obey(self, line: str) -> None:
        command, _, argument = line.partition(" ")
        match command:
            case "/help":
                note(_HELP)
            case "/reset":
                self.conversation = Conversation(system=self.conversation.system)
                note("forgotten")
            case "/system":
                self.conversation = replace(self.conversation, system=argument.strip() or None)
                note("system message removed" if self.conversation.system is None else "system message set")
            case "/undo":
                note("taken back" if self.conversation.turns else "nothing to take back")
                self.conversation = self.conversation.undo()
            case _:
                complain(f"unknown command {command}; /help lists the commands")

    def _reply(self, question: str) -> None:
        before = self.conversation
        asked = self._fit(before.ask(question))
        parts: list[str] = []
        try:
            with self._llm.stream(asked.messages(), self._params) as stream:
                for chunk in stream:
                    parts.append(chunk.text)
                    self._out.write(chunk.text)
                    self._out.flush()
            self._out.write("\n")
        except KeyboardInterrupt:
            self._out.write("\n")
            note("stopped")
        except EngineError:
            raise
        except ShoalError as error:
            self._out.write("\n" if parts else "")
            complain(str(error))
        text = "".join(parts)
        # A question without any answer would leave two questions in a row, which templates and models dislike.
        self.conversation = asked.answer(text) if text else before
        self._out.flush()

    def _fit(self, asked: Conversation) -> Conversation:
        room = self._params.max_tokens
        context = self._llm.model.context_length
        if room is None:
            room = min(_LEAST_ROOM, context // 4)
        fitting = asked.fit(lambda messages: len(self._llm.encode(messages)), context - room)
        if dropped := len(asked.turns) - len(fitting.turns):
            what = "turn was" if dropped == 1 else f"{dropped} turns were"
            note(f"the context is full: the oldest {what} dropped")
        return fitting


def _read_line() -> str:
    # The prompt goes through input(), so that line editing knows its width; a pipe gets none.
    return input("> ") if sys.stdin.isatty() else input()


def _enable_line_editing() -> None:
    # Importing readline is what turns it on. It is not on every platform; input() works without.
    with contextlib.suppress(ImportError):
        import_module("readline")
