"""A completion's tokens to the text that may be shown: detokenizer, then stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.text.detokenizer import Detokenizer
from shoal.text.stop_strings import StopMatcher, StopStrings
from shoal.text.tokenizer import Tokenizer


class TextStream:
    """One completion. After ``stopped`` is set nothing more comes."""

    __slots__ = ("_detokenizer", "_matcher")

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, skip_special: bool = True) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        self._matcher = StopMatcher(StopStrings(stop)) if stop else None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._matcher is not None and self._matcher.stopped

    def push(self, token_id: int, *, stop_allowed: bool = True) -> str:
        """The text that is certain now.

        stop_allowed: off while the output is shorter than its least length; stop strings are ignored there.
        """
        text = self._detokenizer.push(token_id)
        if self._matcher is None:
            return text
        return self._matcher.push(text) if stop_allowed else self._matcher.restart(text)

    def flush(self) -> str:
        """The rest, when the completion ended otherwise than by a stop string."""
        text = self._detokenizer.flush()
        if self._matcher is None:
            return text
        text = self._matcher.push(text)
        return text if self._matcher.stopped else text + self._matcher.flush()
