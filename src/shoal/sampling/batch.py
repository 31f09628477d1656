"""What a step's sampling rows want, as arrays that native code reads in place.

``SAMPLE_PARAMS`` and ``SAMPLE_RESULT`` have the memory layout of ``shoal::SampleParams`` and ``shoal::SampleResult``
in ``csrc/sampler.h``; both sides check it. Variable-length parts (bias, banned ids, history) are ranges
``[start, start + count)`` of flat arrays that all rows share, so a row that uses none costs nothing.

A ``SamplingPacker`` keeps what does not change from step to step, per sequence: the leading bytes of its record, its
bias and ban lists, and for penalized requests the history as an array that only grows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.core.plan import StepEntry
from shoal.core.request import Request
from shoal.sampling.rng import completion_seed

SAMPLE_PARAMS = np.dtype(
    [
        ("temperature", np.float32),  # 0: the most likely token
        ("top_k", np.int32),  # 0: all
        ("top_p", np.float32),  # 1: all
        ("min_p", np.float32),  # 0: all
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("num_logprobs", np.int32),  # -1: none, 0: of the chosen token, k: and the k most likely
        ("seed", np.uint64),  # of this completion
        ("position", np.int64),  # of the token to be sampled
        ("bias_start", np.int32),
        ("bias_count", np.int32),
        ("banned_start", np.int32),
        ("banned_count", np.int32),
        ("history_start", np.int32),
        ("history_count", np.int32),
        ("num_prompt", np.int32),  # so many of the history are the prompt's
        ("mask", np.int32),  # 0: none, k: row k - 1 of the masks
        ("given", np.int32),  # -1: choose a token; else it is this one, and only its log-probabilities are wanted
        ("unused", np.int32),
    ]
)

SAMPLE_RESULT = np.dtype(
    [
        ("token", np.int32),  # -1 unless status is 0
        ("status", np.int32),  # a SampleStatus
        ("logprob", np.float32),  # NaN unless asked for
        ("num_top", np.int32),  # alternatives given: min(num_logprobs, possible tokens)
    ]
)

_Scalar = TypeVar("_Scalar", bound=np.generic)

_HEAD = struct.Struct("=fifffffiQ")
_TAIL = struct.Struct("=qiiiiiiiiii")
_NO_IDS = np.zeros(0, np.int32)
_NO_VALUES = np.zeros(0, np.float32)
_NO_MASKS = np.zeros((0, 0), np.uint32)
_NO_ROWS: Mapping[int, int] = MappingProxyType({})
# Smallest normal float32: a positive double must not become 0 (which would mean something else), nor subnormal.
_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling rows of one step, in plan order; of an entry first the scored ones, then the one that samples.

    rows: SAMPLE_PARAMS [rows].
    bias_ids, bias_values, banned_ids, history: the flat arrays that rows' ranges index.
    masks: [masks, words]; bit i % 32 of word i / 32 says whether token i may be chosen.
    max_logprobs: the largest number of alternatives any row wants, >= 0.
    """

    rows: NDArray[np.void]
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    banned_ids: NDArray[np.int32]
    history: NDArray[np.int32]
    masks: NDArray[np.uint32]
    max_logprobs: int


def pack(
    entries: Sequence[StepEntry], masks: NDArray[np.uint32] = _NO_MASKS, mask_rows: Mapping[int, int] = _NO_ROWS
) -> SamplingBatch:
    """What the entries want of their logits, in order, as arrays."""
    return SamplingPacker().pack(entries, masks, mask_rows)


class SamplingPacker:
    """``pack`` with a memory. Owned by whoever executes steps; ``forget`` a sequence that will not appear again."""

    def __init__(self) -> None:
        self._kept: dict[int, _Sequence] = {}

    def __len__(self) -> int:
        """How many sequences are remembered."""
        return len(self._kept)

    def forget(self, seq_id: int) -> None:
        """Drop what is kept for a sequence; unknown ids are ignored."""
        self._kept.pop(seq_id, None)

    def pack(
        self,
        entries: Iterable[StepEntry],
        masks: NDArray[np.uint32] = _NO_MASKS,
        mask_rows: Mapping[int, int] = _NO_ROWS,
    ) -> SamplingBatch:
        """What the entries want of their logits, in order, as arrays.

        mask_rows: by sequence id, which row of ``masks`` restricts the sequence.
        """
        records: list[bytes] = []
        bias_ids, bias_values = _Flat(_NO_IDS), _Flat(_NO_VALUES)
        banned_ids, history = _Flat(_NO_IDS), _Flat(_NO_IDS)
        max_logprobs = 0
        kept = self._kept
        for entry in entries:
            if entry.scores:
                records += _scored(entry)
                max_logprobs = max(max_logprobs, entry.request.params.prompt_logprobs or 0)
            if not entry.samples:
                continue
            sequence = kept.get(entry.seq_id)
            if sequence is None or sequence.request is not entry.request or sequence.index != entry.index:
                sequence = kept[entry.seq_id] = _Sequence(entry.request, entry.index)
            max_logprobs = max(max_logprobs, sequence.num_logprobs)
            position = entry.start + len(entry.token_ids)
            mask = mask_rows.get(entry.seq_id, -1) + 1
            records.append(sequence.head)
            if sequence.plain:
                records.append(_TAIL.pack(position, 0, 0, 0, 0, 0, 0, 0, mask, -1, 0))
                continue
            bias_start, bias_count = bias_ids.add(sequence.bias_ids)
            bias_values.add(sequence.bias_values)
            banned = sequence.stop_ids if entry.num_generated < sequence.min_tokens else _NO_IDS
            banned_start, banned_count = banned_ids.add(banned)
            past = sequence.history(entry.history) if sequence.penalized else _NO_IDS
            past_start, past_count = history.add(past)
            num_prompt = min(len(entry.request.prompt_ids), past_count)
            records.append(
                _TAIL.pack(
                    position,
                    bias_start,
                    bias_count,
                    banned_start,
                    banned_count,
                    past_start,
                    past_count,
                    num_prompt,
                    mask,
                    -1,
                    0,
                )
            )
        return SamplingBatch(
            rows=np.frombuffer(b"".join(records), SAMPLE_PARAMS),
            bias_ids=bias_ids.joined(),
            bias_values=bias_values.joined(),
            banned_ids=banned_ids.joined(),
            history=history.joined(),
            masks=masks,
            max_logprobs=max_logprobs,
        )


def _scored(entry: StepEntry) -> list[bytes]:
    """A record for each scored row: the token after it is the prompt's."""
    head = _HEAD.pack(0, 0, 1, 0, 1, 0, 0, entry.request.params.prompt_logprobs, 0)
    end = entry.start + entry.num_scored
    prompt = entry.request.prompt_ids
    return [
        head + _TAIL.pack(position, 0, 0, 0, 0, 0, 0, 0, 0, prompt[position], 0)
        for position in range(entry.start + 1, end + 1)
    ]


class _Flat(Generic[_Scalar]):
    """Pieces of a flat array in the making."""

    __slots__ = ("_empty", "_length", "_pieces")

    def __init__(self, empty: NDArray[_Scalar]) -> None:
        self._empty = empty
        self._pieces: list[NDArray[_Scalar]] = []
        self._length = 0

    def add(self, piece: NDArray[_Scalar]) -> tuple[int, int]:
        """Append; where the piece starts and how long it is."""
        start, count = self._length, len(piece)
        if count:
            self._pieces.append(piece)
            self._length += count
        return start, count

    def joined(self) -> NDArray[_Scalar]:
        return np.concatenate(self._pieces) if self._pieces else self._empty


class _Sequence:
    """What one completion's records have in common."""

    __slots__ = (
        "_past",
        "_past_length",
        "bias_ids",
        "bias_values",
        "head",
        "index",
        "min_tokens",
        "num_logprobs",
        "penalized",
        "plain",
        "request",
        "stop_ids",
    )

    def __init__(self, request: Request, index: int) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.num_logprobs = -1 if params.logprobs is None else params.logprobs
        bias: Mapping[int, float] = params.logit_bias
        self.bias_ids = np.fromiter(bias.keys(), np.int32, len(bias))
        self.bias_values = np.fromiter(bias.values(), np.float32, len(bias))
        self.stop_ids = np.array(sorted(request.stop_ids), np.int32)
        self.min_tokens = params.min_tokens if request.stop_ids else 0
        self.penalized = params.penalized
        self.plain = not bias and not self.min_tokens and not self.penalized
        self._past = _NO_IDS
        self._past_length = 0
        self.head = _HEAD.pack(
            _positive(params.temperature),
            params.top_k,
            _positive(params.top_p),
            _positive(params.min_p),
            _positive(params.repetition_penalty),
            params.presence_penalty,
            params.frequency_penalty,
            self.num_logprobs,
            completion_seed(request.seed, index),
        )

    def history(self, tokens: tuple[int, ...]) -> NDArray[np.int32]:
        """``tokens`` as an array. A sequence's tokens only grow, so only the new ones are converted."""
        length = len(tokens)
        done = min(self._past_length, length)
        if length > len(self._past):
            grown = np.empty(max(2 * len(self._past), length + 64), np.int32)
            grown[:done] = self._past[:done]
            self._past = grown
        if length > done:
            self._past[done:length] = tokens[done:]
        self._past_length = length
        return self._past[:length]


def _positive(value: float) -> float:
    """``value`` >= 0 as float32 will hold it: 0 stays 0 and anything above stays above."""
    return 0.0 if value == 0 else max(float(value), _TINY)
