"""What ``shoal run`` shows while it runs: some answers growing side by side over a progress bar, or plain lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from shoal.cli.prompt_file import PromptLine
from shoal.engine.messages import Chunk
from shoal.engine.outputs import RequestOutput

_LIVE_LINES = 6  # of each growing answer, the last ones
_REFRESH_PER_SECOND = 10
_TITLE_CHARS = 60


class Display(Protocol):
    """Shows a run's progress; used as a context manager around it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def add_chunk(self, position: int, chunk: Chunk) -> None:
        """A completion of the request at ``position`` gained something."""

    def add_output(self, position: int, output: RequestOutput) -> None:
        """The request at ``position`` is done."""


def make_display(console: Console, lines: Sequence[PromptLine], stream: int) -> Display:
    """For a terminal a live one, otherwise a plain one."""
    return LiveDisplay(console, lines, stream) if console.is_terminal else PlainDisplay(console, lines, stream)


def title(line: PromptLine) -> str:
    """A prompt in a few words: its id and how its last message begins."""
    text = line.prompt if isinstance(line.prompt, str) else line.prompt[-1]["content"]
    flat = " ".join(text.split())
    return f"{line.id}: {flat if len(flat) <= _TITLE_CHARS else flat[: _TITLE_CHARS - 1] + '…'}"


class PlainDisplay:
    """Whole answers as they are done, and a line for every tenth of the run."""

    def __init__(self, console: Console, lines: Sequence[PromptLine], stream: int) -> None:
        self._console = console
        self._lines = lines
        self._stream = stream
        self._done = 0
        self._tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return

    def add_chunk(self, position: int, chunk: Chunk) -> None:
        """Count."""
        self._tokens += len(chunk.token_ids)

    def add_output(self, position: int, output: RequestOutput) -> None:
        """Print the answer if it is one of the first, and now and then the progress."""
        if position < self._stream:
            self._print(f"--- {title(self._lines[position])}\n{output.text}\n---")
        before, self._done = self._done, self._done + 1
        total = len(self._lines)
        if before * 10 // total != self._done * 10 // total:
            self._print(f"{self._done}/{total} requests, {self._tokens} tokens")

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


class LiveDisplay:
    """A panel for each of the first answers while it grows; a finished one is printed above and stays."""

    def __init__(self, console: Console, lines: Sequence[PromptLine], stream: int) -> None:
        self._lines = lines
        self._stream = stream
        self._texts: dict[int, str] = {}
        self._started = time.monotonic()
        self._tokens = 0
        self._progress = Progress(
            TextColumn("answering"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens, {task.fields[rate]:.0f}/s"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task("answering", total=len(lines), tokens=0, rate=0.0)
        self._live = Live(
            get_renderable=self._render, console=console, refresh_per_second=_REFRESH_PER_SECOND, transient=False
        )

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def add_chunk(self, position: int, chunk: Chunk) -> None:
        """Let the answer grow."""
        if position < self._stream and chunk.index == 0:
            self._texts[position] = self._texts.get(position, "") + chunk.text
        self._tokens += len(chunk.token_ids)
        rate = self._tokens / max(time.monotonic() - self._started, 1e-9)
        self._progress.update(self._task, tokens=self._tokens, rate=rate)

    def add_output(self, position: int, output: RequestOutput) -> None:
        """Print a finished answer above the live part."""
        if position < self._stream:
            self._texts.pop(position, None)
            self._live.console.print(self._panel(position, output.text))
        self._progress.advance(self._task)

    def _render(self) -> Group:
        # Called by the refreshing thread: a copy first, the dictionary changes meanwhile.
        growing = sorted(self._texts.copy().items())
        return Group(*(self._panel(position, _tail(text)) for position, text in growing), self._progress)

    def _panel(self, position: int, text: str) -> Panel:
        return Panel(Text(text), title=Text(title(self._lines[position])), title_align="left")


def _tail(text: str) -> str:
    # The cut by characters keeps one endless line from filling the screen.
    return "\n".join(text.splitlines()[-_LIVE_LINES:])[-80 * _LIVE_LINES :]
