"""What is refused because there is too much to do, and when to come back.

A request is refused at once if the waiting queue has no room for it, if it would wait for longer than the limit, or if
its caller has as many completions waiting as there are places left: so one caller alone gets half of the queue, two get
a third each, and there is always room for one who has nothing in it (the dynamic threshold of Choudhury and Hahne,
"Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998, with alpha 1). The time to come back after is
what ``backlog`` predicts, and a quarter more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from shoal.core.request import Request
from shoal.engine.client import Stream
from shoal.engine.request import EmptyResult
from shoal.errors import QueueFullError
from shoal.server.errors import RATE_LIMIT, ApiError, retry_after
from shoal.server.service import ServedModel

_MARGIN = 1.25
_FRESH_SECONDS = 0.1  # a prediction looks at everything that waits, so it serves for so long


class Overload:
    """max_wait: seconds that a request may be predicted to wait; 0 is without limit."""

    def __init__(self, max_wait: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_wait = max_wait
        self._clock = clock
        self._predictions: dict[int, float] = {}  # by priority
        self._predicted_at = 0.0

    def queue(self, served: ServedModel, requests: Sequence[Request | EmptyResult]) -> Stream:
        """Queue them, all or none; ``ApiError`` 429 for none."""
        computed = [request for request in requests if isinstance(request, Request)]
        count = sum(request.params.n for request in computed)
        if computed:
            self._check_share(served, computed[0].tenant, count)
            self._check_wait(served, computed[0].priority)
        try:
            return served.client.queue(requests)
        except QueueFullError as error:
            raise _full(
                f"{error.limit} requests may wait, and there is no room for {count} more", served, count
            ) from None

    def _check_share(self, served: ServedModel, tenant: str, count: int) -> None:
        if not tenant:
            return
        limit = served.engine.limits.max_waiting
        mine = served.client.waiting(tenant)
        left = limit - max(served.engine.stats.scheduler.waiting, mine)
        if mine and mine + count > left:
            message = f"this API key has {mine} of {limit} places in the queue; the others are kept for other keys"
            raise _full(message, served, count)

    def _check_wait(self, served: ServedModel, priority: int) -> None:
        if not self._max_wait:
            return
        now = self._clock()
        if now - self._predicted_at > _FRESH_SECONDS:
            self._predictions.clear()
            self._predicted_at = now
        wait = self._predictions.get(priority)
        if wait is None:
            wait = self._predictions[priority] = served.client.predicted_wait(served.pace, priority)
        if wait > self._max_wait:
            raise ApiError(
                429,
                f"a request would wait about {wait:.0f} s, and the server's limit is {self._max_wait:.0f} s "
                "(--max-wait); retry later",
                type=RATE_LIMIT,
                code="wait_too_long",
                headers=retry_after((wait - self._max_wait) * _MARGIN),
            )


def _full(message: str, served: ServedModel, count: int) -> ApiError:
    wait = served.client.predicted_room(served.pace, count) * _MARGIN
    return ApiError(429, f"{message}; retry later", type=RATE_LIMIT, code="queue_full", headers=retry_after(wait))
