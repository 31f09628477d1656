"""What a request used, and how long it took.

Prompt tokens count once per prompt, whatever ``n`` is; completion tokens count for every completion that was made, the
tokens that ended them included. Several prompts of one request have one ``timings`` object: their times are those that
the caller saw, from the first that was worked on to the last that was done, and their costs are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.engine.client import StreamedRequest
from shoal.engine.messages import Chunk
from shoal.metrics.timeline import RequestTimeline


class Tally:
    """Counts one HTTP request's tokens as its chunks pass by."""

    def __init__(self, requests: Sequence[StreamedRequest]) -> None:
        self.prompt_tokens = sum(len(request.prompt_ids) for request in requests)
        self.completion_tokens = 0
        self.timelines: list[RequestTimeline] = []  # of requests that are done
        self._finishes: dict[tuple[str, int], str] = {}

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk."""
        self.completion_tokens += len(chunk.token_ids)
        if chunk.finish is not None:
            self._finishes[chunk.request_id, chunk.index] = chunk.finish.value
        if chunk.timeline is not None:
            self.timelines.append(chunk.timeline)

    @property
    def finish_reasons(self) -> list[str]:
        """Of the completions that are done, in the order in which they ended."""
        return list(self._finishes.values())

    @property
    def cached_tokens(self) -> int:
        """Tokens of prompts that were found in the prefix cache."""
        return sum(timeline.cached_tokens for timeline in self.timelines)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def timings(self) -> dict[str, float | None]:
        """Shoal's timings object, in seconds; null where there is nothing to measure."""
        lines = self.timelines
        arrived = min((line.arrived for line in lines), default=None)
        admitted = min((line.admitted for line in lines if line.admitted is not None), default=None)
        first = min((line.first_token for line in lines if line.first_token is not None), default=None)
        finished = max((line.finished for line in lines if line.finished is not None), default=None)
        rides = sum(line.rides for line in lines)
        return {
            "queue_s": _between(arrived, admitted),
            "prefill_s": _between(admitted, first),
            "decode_s": _between(first, finished),
            "ttft_s": _between(arrived, first),
            "total_s": _between(arrived, finished),
            "mean_batch": sum(line.batches for line in lines) / rides if rides else None,
            "compute_s": sum(line.compute for line in lines),
        }


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
