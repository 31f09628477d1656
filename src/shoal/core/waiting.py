"""Sequences that wait, and who of them comes first.

Under a fair policy each tenant has a line of its own in each priority, in the policy's order. Which priority is next is
decided by the first of its sequences in that order, so ageing counts between priorities; which of its lines, by whose
tenant has had least. Under any other policy there is a single line.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain

from shoal.core.fair_share import FairShare
from shoal.core.policy import Policy
from shoal.core.sequence import Sequence

_Line = list[tuple[tuple[float, ...], Sequence]]
_Name = tuple[int, str]  # priority and tenant


class WaitingQueue:
    """Every sequence once. ``share`` is read, not changed."""

    def __init__(self, policy: Policy, share: FairShare) -> None:
        self._policy = policy
        self._share = share
        self._lines: dict[_Name, _Line] = {}  # ascending by key; none is empty
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, sequence: Sequence) -> None:
        """Let it wait in its place."""
        insort(self._lines.setdefault(self._name(sequence), []), (sequence.key, sequence))
        self._count += 1

    def remove(self, sequence: Sequence) -> None:
        """It waits no more."""
        name = self._name(sequence)
        line = self._lines[name]
        del line[bisect_left(line, (sequence.key,))]
        if not line:
            del self._lines[name]
        self._count -= 1

    def in_order(self) -> Iterator[Sequence]:
        """First who is to be admitted first. Adding or removing ends what the iterator is good for."""
        lines = self._lines
        names = list(lines)
        if len(names) > 1:
            first: dict[int, tuple[float, ...]] = {}
            for name, line in lines.items():
                first[name[0]] = min(first.get(name[0], line[0][0]), line[0][0])
            names.sort(key=lambda name: (first[name[0]], self._share.had(name[1]), lines[name][0][0]))
        return (sequence for _, sequence in chain.from_iterable(lines[name] for name in names))

    def lines(self) -> list[_Line]:
        """All of them, for whoever checks the invariants."""
        return list(self._lines.values())

    def _name(self, sequence: Sequence) -> _Name:
        return (sequence.request.priority, sequence.request.tenant) if self._policy.fair else (0, "")
