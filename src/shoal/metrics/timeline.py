"""When things happened to one request: the only place where time stamps live.

TTFT is arrival to first token. ITL is the gap between two deliveries of one completion. TPOT is (last - first) /
(tokens - 1) of one completion. All in seconds of whatever clock the stamps came from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class RequestTimeline:
    """Filled by the engine while the request runs.

    token_times: per completion, when each delivery happened and how many tokens it brought.
    compute: seconds of steps charged to it: of each step, the part that its rows were of all rows.
    rides: entries it had in steps; batches: sequences in those steps, summed over the rides.
    """

    arrived: float
    admitted: float | None = None
    finished: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    token_times: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    compute: float = 0.0
    rides: int = 0
    batches: int = 0

    def admit(self, at: float) -> None:
        """The first time any of the request's rows ran; later calls change nothing."""
        if self.admitted is None:
            self.admitted = at

    def add_token(self, index: int, at: float, count: int = 1) -> None:
        """``count`` tokens of completion ``index`` were delivered."""
        self.token_times.setdefault(index, []).append((at, count))

    def charge(self, seconds: float, batch: int) -> None:
        """One of its sequences rode in a step of ``batch`` sequences; ``seconds`` of it are this request's."""
        self.compute += seconds
        self.rides += 1
        self.batches += batch

    def finish(self, at: float) -> None:
        """The last completion ended."""
        self.finished = at

    @property
    def queue_time(self) -> float | None:
        """Arrival to first computation; None if nothing was computed."""
        return None if self.admitted is None else self.admitted - self.arrived

    @property
    def first_token(self) -> float | None:
        """When the first token of any completion was delivered."""
        return min((times[0][0] for times in self.token_times.values()), default=None)

    @property
    def ttft(self) -> float | None:
        """Arrival to first token; None if there was none."""
        first = self.first_token
        return None if first is None else first - self.arrived

    @property
    def prefill_time(self) -> float | None:
        """First computation to first token; None if there was none."""
        first = self.first_token
        return None if first is None or self.admitted is None else first - self.admitted

    @property
    def decode_time(self) -> float | None:
        """First token to the end; None if there was no token or it still runs."""
        first = self.first_token
        return None if first is None or self.finished is None else self.finished - first

    @property
    def mean_batch(self) -> float | None:
        """Sequences in the steps it rode in, on average; None if it rode in none."""
        return self.batches / self.rides if self.rides else None

    @property
    def total(self) -> float | None:
        """Arrival to the end; None while it runs."""
        return None if self.finished is None else self.finished - self.arrived

    @property
    def itl(self) -> tuple[float, ...]:
        """Gaps between deliveries, of all completions."""
        gaps = []
        for times in self.token_times.values():
            gaps += [after - before for (before, _), (after, _) in pairwise(times)]
        return tuple(gaps)

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first, averaged over completions of at least two tokens; None without any."""
        means = []
        for times in self.token_times.values():
            tokens = sum(count for _, count in times)
            if tokens > 1:
                means.append((times[-1][0] - times[0][0]) / (tokens - 1))
        return sum(means) / len(means) if means else None
