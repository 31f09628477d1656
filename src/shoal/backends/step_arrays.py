"""A step plan as arrays, for every backend that computes.

Block tables change rarely (a decode adds a block every ``block_size`` steps) but are needed in every step, so they are
kept: one row of a matrix per sequence, rewritten only when the entry brings another tuple than last time. The plan's
promise that an unchanged table is the same object makes that test one comparison of identities.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.core.plan import StepEntry, StepPlan
from shoal.errors import KernelError
from shoal.kernels.ops import StepInputs

NO_BLOCK = -1
_FIRST_SLOTS = 64
_FIRST_WIDTH = 16


class StepArrays:
    """Makes ``StepInputs``; keeps the block tables of the sequences that it has seen until told to forget them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._slots: dict[int, int] = {}
        self._free = list(range(_FIRST_SLOTS - 1, -1, -1))
        # Per slot the tuple its matrix row was written from; holding the tuple keeps its identity from being reused.
        self._written: list[tuple[int, ...]] = [()] * _FIRST_SLOTS
        self._tables: NDArray[np.int32] = np.full((_FIRST_SLOTS, _FIRST_WIDTH), NO_BLOCK, dtype=np.int32)
        self._capacities: NDArray[np.int64] = np.zeros(_FIRST_SLOTS, dtype=np.int64)  # tokens that fit the table

    def to_step_inputs(self, plan: StepPlan) -> StepInputs:
        """The plan's arrays; ``sample_rows`` are each entry's scored rows, in order, and then the one that samples.

        A table too short for its entry's rows is a ``KernelError``: computing would write into foreign memory.
        """
        entries = plan.entries
        slots: list[int] = []
        starts: list[int] = []
        lengths: list[int] = []
        token_ids: list[int] = []
        sampling: list[int] = []
        scoring = False
        known, written = self._slots, self._written
        for index, (seq_id, _, _, start, tokens, table, samples, _, _, scores) in enumerate(entries):
            slot = known.get(seq_id)
            if slot is None or written[slot] is not table:
                slot = self._write(seq_id, table)
                written = self._written
            slots.append(slot)
            starts.append(start)
            lengths.append(len(tokens))
            token_ids += tokens
            if samples:
                sampling.append(index)
            if scores:
                scoring = True

        slot_array = np.array(slots, dtype=np.intp)
        start_array = np.array(starts, dtype=np.int64)
        row_starts = np.zeros(len(entries) + 1, dtype=np.int32)
        if lengths.count(1) == len(lengths):  # the common step: decodes only
            row_starts[1:] = np.arange(1, len(entries) + 1)
            ends = start_array + 1
            positions = start_array.astype(np.int32)
        else:
            length_array = np.array(lengths, dtype=np.int64)
            ends = start_array + length_array
            np.cumsum(length_array, out=row_starts[1:])
            first_rows = np.repeat(start_array - row_starts[:-1], length_array)
            positions = (first_rows + np.arange(len(token_ids))).astype(np.int32)
        short = ends > self._capacities[slot_array]
        if short.any():
            entry = entries[int(np.argmax(short))]
            raise KernelError(
                f"sequence {entry.seq_id}: rows [{entry.start}, {entry.start + len(entry.token_ids)}) do not fit "
                f"its {len(entry.block_table)} blocks of {self._block_size} tokens"
            )
        return StepInputs(
            token_ids=np.array(token_ids, dtype=np.int32),
            positions=positions,
            row_starts=row_starts,
            block_tables=self._tables[slot_array],
            sample_rows=_wanted_rows(entries, row_starts) if scoring else row_starts[1:][sampling] - np.int32(1),
        )

    def forget(self, seq_id: int) -> None:
        """Drop the sequence's table; unknown ids are ignored."""
        slot = self._slots.pop(seq_id, None)
        if slot is not None:
            self._written[slot] = ()
            self._tables[slot] = NO_BLOCK
            self._capacities[slot] = 0
            self._free.append(slot)

    def _write(self, seq_id: int, table: tuple[int, ...]) -> int:
        if not self._free:
            self._grow(slots=2 * len(self._tables), width=self._tables.shape[1])
        if len(table) > self._tables.shape[1]:
            self._grow(slots=len(self._tables), width=max(len(table), 2 * self._tables.shape[1]))
        slot = self._slots.get(seq_id)
        if slot is None:
            slot = self._slots[seq_id] = self._free.pop()
        row = self._tables[slot]
        row[: len(table)] = table
        row[len(table) :] = NO_BLOCK
        self._written[slot] = table
        self._capacities[slot] = len(table) * self._block_size
        return slot

    def _grow(self, *, slots: int, width: int) -> None:
        old_slots, old_width = self._tables.shape
        tables = np.full((slots, width), NO_BLOCK, dtype=np.int32)
        tables[:old_slots, :old_width] = self._tables
        self._tables = tables
        self._capacities = np.concatenate((self._capacities, np.zeros(slots - old_slots, dtype=np.int64)))
        self._written = self._written + [()] * (slots - old_slots)
        self._free = list(range(slots - 1, old_slots - 1, -1)) + self._free


def _wanted_rows(entries: Sequence[StepEntry], row_starts: NDArray[np.int32]) -> NDArray[np.int32]:
    rows: list[int] = []
    for entry, first in zip(entries, row_starts.tolist(), strict=False):
        rows += range(first, first + entry.num_scored)
        if entry.samples:
            rows.append(first + len(entry.token_ids) - 1)
    return np.array(rows, dtype=np.int32)
