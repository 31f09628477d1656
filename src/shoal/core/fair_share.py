"""How much each tenant has had, so that whoever had least comes next.

The service of a tenant is counted in rows of steps, over its weight, while others want some too. A tenant that comes
back after a pause starts level with the one that had least of those who stayed: a pause saves nothing up, and what was
had before is not forgotten. This is the virtual token counter of Sheng et al., "Fairness in Serving Large Language
Models" (OSDI 2024), with rows for its weighted tokens.
"""

from __future__ import annotations

from collections import Counter

_MOST_IDLE = 64  # tenants remembered without a request of theirs


class FairShare:
    """Counts service by tenant."""

    def __init__(self) -> None:
        self._live: Counter[str] = Counter()  # sequences that wait or run
        self._served: dict[str, float] = {}

    @property
    def contended(self) -> bool:
        """Whether several tenants want something."""
        return len(self._live) > 1

    def enter(self, tenant: str) -> None:
        """A sequence of the tenant's has arrived."""
        if not self._live:
            self._served.clear()
        if tenant not in self._live:
            least = min((self._served[name] for name in self._live), default=0.0)
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
            if len(self._served) > len(self._live) + _MOST_IDLE:
                # Whoever had no more than the least would come back level with it, remembered or not.
                kept = {name: had for name, had in self._served.items() if name in self._live or had > least}
                self._served = {**kept, tenant: self._served[tenant]}
        self._live[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A sequence of the tenant's has ended."""
        self._live[tenant] -= 1
        if not self._live[tenant]:
            del self._live[tenant]

    def charge(self, tenant: str, rows: int, weight: float) -> None:
        """The tenant has rows in a step."""
        self._served[tenant] += rows / weight

    def had(self, tenant: str) -> float:
        """Of a tenant with a sequence: its service so far."""
        return self._served[tenant]

    def check(self, sequences: Counter[str]) -> bool:
        """Whether the sequences counted are these."""
        return self._live == sequences and self._served.keys() >= self._live.keys()
