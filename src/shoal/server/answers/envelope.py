"""What stands around the choices in every object of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Of one answer.

    kind: ``object`` of the whole answer; event_kind: of a stream's objects.
    null_usage: a stream whose end tells the usage says in every other object that it does not.
    """

    id: str
    kind: str
    event_kind: str
    created: int
    model: str
    fingerprint: str
    null_usage: bool

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The answer; usage follows."""
        return {**self._head(self.kind), "choices": choices}

    def event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One object of a stream."""
        head = self._head(self.event_kind)
        return {**head, "choices": choices, "usage": None} if self.null_usage else {**head, "choices": choices}

    def last(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """The object without choices that ends a stream."""
        return {**self._head(self.event_kind), "choices": [], **more}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
