"""Finding stop strings in text that arrives in pieces.

The text before a stop string may be shown as soon as it is certain not to be part of one, so the end of the text is
held back as long as it is the beginning of a stop string. An automaton over all stop strings (Aho & Corasick 1975)
knows after each character how long that beginning is; every character is looked at once.

The stop string that ends first wins, since it is the one that a reader of the stream meets first; of several that end
at the same character the longest, which begins first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The automaton of some stop strings; immutable, so completions can share it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._hit = [0]  # length of the longest stop string that ends in this state, else 0
        for stop in stops:
            state = 0
            for char in stop:
                state = self._child(state, char)
            self._hit[state] = len(stop)
        self._fallback = [0] * len(self._next)
        self._link()

    def step(self, state: int, char: str) -> int:
        """The state after a character: the longest suffix of the text that begins a stop string."""
        while state and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, 0)

    def depth(self, state: int) -> int:
        """Length of that suffix."""
        return self._depth[state]

    def hit(self, state: int) -> int:
        """Length of the stop string that has just ended, or 0."""
        return self._hit[state]

    def _child(self, state: int, char: str) -> int:
        child = self._next[state].get(char)
        if child is None:
            child = self._next[state][char] = len(self._next)
            self._next.append({})
            self._depth.append(self._depth[state] + 1)
            self._hit.append(0)
        return child

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._fallback[child] = self.step(self._fallback[state], char)
                queue.append(child)
            # The whole suffix is longer than any stop string inside it, so its own hit comes first.
            self._hit[state] = self._hit[state] or self._hit[self._fallback[state]]


class StopMatcher:
    """One completion's text on its way through the automaton."""

    __slots__ = ("_automaton", "_held", "_state", "stopped")

    def __init__(self, automaton: StopStrings) -> None:
        self._automaton = automaton
        self._state = 0
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is certain now. After a hit ``stopped`` is set and nothing comes any more."""
        if self.stopped:
            return ""
        automaton, state = self._automaton, self._state
        text = self._held + text
        for position in range(len(self._held), len(text)):
            state = automaton.step(state, text[position])
            length = automaton.hit(state)
            if length:
                self.stopped = True
                self._held = ""
                return text[: position + 1 - length]
        self._state = state
        keep = automaton.depth(state)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def restart(self, text: str) -> str:
        """Text in which no stop string counts, and after which none may have begun; with what was held before."""
        held, self._held, self._state = self._held, "", 0
        return held + text

    def flush(self) -> str:
        """What was held back for a stop string that did not come."""
        held, self._held, self._state = self._held, "", 0
        return held
