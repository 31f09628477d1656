"""A limit on tokens per minute, as a bucket that may be overdrawn.

How many tokens an answer will have is not known beforehand, so a request is let in while anything is left, and
tokens are taken out as they come. What one took too much the next ones wait for: over any long time the rate holds.
"""

from __future__ import annotations

import math


class TokenBucket:
    """Holds a minute's tokens at most. Times are seconds on any one clock."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._rate = per_minute / 60
        self._level = float(per_minute)
        self._at = now

    def take(self, tokens: int, now: float) -> None:
        """Whether they are there or not."""
        self._fill(now)
        self._level -= tokens

    def left(self, now: float) -> int:
        """Tokens that can be taken; none if it is overdrawn."""
        self._fill(now)
        return max(math.floor(self._level), 0)

    def wait(self, now: float) -> float:
        """Seconds until a token is there; 0 if one is."""
        self._fill(now)
        return max(1.0 - self._level, 0.0) / self._rate

    def until_full(self, now: float) -> float:
        """Seconds until a minute's tokens are there, if none is taken."""
        self._fill(now)
        return (self.per_minute - self._level) / self._rate

    def _fill(self, now: float) -> None:
        self._level = min(self._level + (now - self._at) * self._rate, float(self.per_minute))
        self._at = now
