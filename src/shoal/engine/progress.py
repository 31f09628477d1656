"""The progress bar of ``LLM.generate``."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class ProgressBar:
    """Requests done and tokens per second, on standard error; costs nothing when not shown."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._tokens = 0
        self._progress = None
        if shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[tokens]} tokens"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._progress.add_task("generating", total=total, tokens=0)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def add_tokens(self, count: int) -> None:
        """Some tokens came."""
        if self._progress is not None:
            self._tokens += count
            self._progress.update(self._task, tokens=self._tokens)

    def add_done(self) -> None:
        """One more request is done."""
        if self._progress is not None:
            self._progress.advance(self._task)
