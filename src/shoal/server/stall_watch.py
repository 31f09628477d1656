"""Notices an engine whose step does not come to an end.

A step cannot be interrupted, so whoever notices can only end the process. Time is counted in looks, one a second, and
not read from a clock: a process that was stopped or a machine that slept has not looked either.
"""

from __future__ import annotations


class StallWatch:
    """looks: how often in succession the same step may be seen; 0 is any number."""

    def __init__(self, looks: int) -> None:
        self._looks = looks
        self._step: int | None = None
        self._seen = 0

    def stuck(self, in_step: int | None) -> bool:
        """Look once. in_step: the number of the step that goes on now, if one does."""
        if in_step is None or in_step != self._step:
            self._step, self._seen = in_step, 0
            return False
        self._seen += 1
        return 0 < self._looks <= self._seen
