"""What sampling a step's rows gave, as arrays and as the plan's own values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from shoal.core.plan import EntryResult, StepEntry, TokenLogprobs
from shoal.sampling.batch import SAMPLE_RESULT, SamplingBatch


class SampleStatus(IntEnum):
    """How a row ended; the values are those of ``shoal::SampleStatus``."""

    OK = 0
    NOT_FINITE = 1
    NO_CANDIDATE = 2
    BAD_ID = 3

    @property
    def message(self) -> str:
        """What to tell the request's owner."""
        return _MESSAGES[self]


_MESSAGES = {
    SampleStatus.OK: "",
    SampleStatus.NOT_FINITE: "the model's logits hold NaN or infinity: the model file or its format is at fault",
    SampleStatus.NO_CANDIDATE: "no token is possible: every one is banned or has no probability",
    SampleStatus.BAD_ID: (
        "a token id in logit_bias, the stop ids, the prompt or the history is outside the model's vocabulary"
    ),
}


@dataclass(frozen=True, slots=True)
class SampledRows:
    """One result per row of a ``SamplingBatch``.

    results: SAMPLE_RESULT [rows].
    top_ids, top_logprobs: [rows, max_logprobs], best first; row r's first ``num_top`` are meant.
    """

    results: NDArray[np.void]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    @classmethod
    def empty(cls, batch: SamplingBatch) -> SampledRows:
        """Arrays for native code to fill."""
        rows = len(batch.rows)
        return cls(
            np.zeros(rows, SAMPLE_RESULT),
            np.zeros((rows, batch.max_logprobs), np.int32),
            np.zeros((rows, batch.max_logprobs), np.float32),
        )


def entry_results(entries: Sequence[StepEntry], batch: SamplingBatch, sampled: SampledRows) -> list[EntryResult]:
    """The result of each entry, in order; ``batch`` was packed from the same entries."""
    rows = sampled.results.tolist()
    wanted: list[int] = batch.rows["num_logprobs"].tolist()
    found: list[EntryResult] = []
    row = 0
    for entry in entries:
        scored: tuple[TokenLogprobs, ...] = ()
        if entry.scores:
            end = row + entry.num_scored
            problem = next((status for _, status, _, _ in rows[row:end] if status != SampleStatus.OK), None)
            if problem is not None:
                found.append(EntryResult(error=SampleStatus(problem).message))
                row = end + entry.samples
                continue
            scored = tuple(_logprobs(sampled, index, rows[index]) for index in range(row, end))
            row = end
        if not entry.samples:
            found.append(EntryResult(prompt_logprobs=scored))
            continue
        token, status, _, _ = rows[row]
        if status != SampleStatus.OK:
            found.append(EntryResult(error=SampleStatus(status).message))
        elif wanted[row] < 0:
            found.append(EntryResult((token,), prompt_logprobs=scored))
        else:
            found.append(EntryResult((token,), (_logprobs(sampled, row, rows[row]),), prompt_logprobs=scored))
        row += 1
    return found


def _logprobs(sampled: SampledRows, row: int, result: tuple[int, int, float, int]) -> TokenLogprobs:
    _, _, logprob, num_top = result
    ids = sampled.top_ids[row, :num_top].tolist()
    values = sampled.top_logprobs[row, :num_top].tolist()
    return TokenLogprobs(logprob, tuple(zip(ids, values, strict=True)))
