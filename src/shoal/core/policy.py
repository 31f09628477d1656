"""Who comes first. A policy orders sequences and says who must make room; it never touches blocks.

fcfs: by arrival. priority: higher first, then by arrival, with fair shares between tenants and with ageing. deadline:
earliest first, those without one last. static: by arrival, in whole batches: nobody is admitted while anybody runs, and
whoever is done keeps its place until the batch is done. That is how batching worked before it became continuous; it is
here to be measured against.

Ageing: each ``ageing`` seconds since its arrival are worth one level of priority to a request. All age at the same
speed, so who is ahead of whom never changes: a request is ahead of those that arrived later by more than the levels
between them are worth. Hence ``order`` is one number that is known at arrival, and no request of low priority is passed
for ever. Ageing only counts between priorities; within one it would undo the fair shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shoal.core.request import Request

Order = Callable[[Request, float, float | None], float]


@dataclass(frozen=True, slots=True)
class Policy:
    """of: gives ``order`` from the request, its arrival and ``ageing``.

    displaces: whether a waiting sequence may take the place of a running one that is behind it and of lower priority.
    in_batches: whether admission waits for an empty engine and finished sequences keep their place.
    fair: whether tenants of one priority share the engine evenly (see ``fair_share``).
    ageing: seconds of waiting that are worth a level; None is never.
    """

    name: str
    of: Order
    displaces: bool = False
    in_batches: bool = False
    fair: bool = False
    ageing: float | None = None

    def order(self, request: Request, arrived: float) -> float:
        """The leading part of a sequence's key, before its number; smaller is served first."""
        return self.of(request, arrived, self.ageing)


def _by_arrival(request: Request, arrived: float, ageing: float | None) -> float:
    return 0.0


def _by_priority(request: Request, arrived: float, ageing: float | None) -> float:
    return (0.0 if ageing is None else arrived / ageing) - request.priority


def _by_deadline(request: Request, arrived: float, ageing: float | None) -> float:
    return math.inf if request.deadline is None else request.deadline


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "fcfs": Policy("fcfs", _by_arrival),
        "priority": Policy("priority", _by_priority, displaces=True, fair=True),
        "deadline": Policy("deadline", _by_deadline),
        "static": Policy("static", _by_arrival, in_batches=True),
    }
)
