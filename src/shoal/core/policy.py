"""Who comes first. A policy orders sequences and says who must make room; it never touches blocks.

fcfs: by arrival. priority: higher first, then by arrival. deadline: earliest first, those without one last. static: by
arrival, in whole batches: nobody is admitted while anybody runs, and whoever is done keeps its place until the batch
is done. That is how batching worked before it became continuous; it is here to be measured against.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shoal.core.request import Request


@dataclass(frozen=True, slots=True)
class Policy:
    """order: the leading part of a sequence's key, before its arrival number; smaller is served first.

    displaces: whether a waiting sequence may take the place of a running one with a larger ``order``.
    in_batches: whether admission waits for an empty engine and finished sequences keep their place.
    """

    name: str
    order: Callable[[Request], float]
    displaces: bool = False
    in_batches: bool = False


def _by_arrival(request: Request) -> float:
    return 0.0


def _by_priority(request: Request) -> float:
    return float(-request.priority)


def _by_deadline(request: Request) -> float:
    return math.inf if request.deadline is None else request.deadline


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "fcfs": Policy("fcfs", _by_arrival),
        "priority": Policy("priority", _by_priority, displaces=True),
        "deadline": Policy("deadline", _by_deadline),
        "static": Policy("static", _by_arrival, in_batches=True),
    }
)
