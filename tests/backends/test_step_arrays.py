"""Plans as arrays, against a twin that builds everything anew."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import entry, plan, request

from shoal.backends.step_arrays import NO_BLOCK, StepArrays
from shoal.core.plan import StepPlan
from shoal.errors import KernelError

BLOCK = 4


def check(arrays: StepArrays, step: StepPlan) -> None:
    inputs = arrays.to_step_inputs(step)
    tokens, positions, starts, samples = [], [], [0], []
    for index, item in enumerate(step.entries):
        tokens += item.token_ids
        positions += range(item.start, item.start + len(item.token_ids))
        starts.append(len(tokens))
        if item.scores:
            last = len(item.request.prompt_ids) - 1
            samples += [
                starts[-2] + row for row, position in enumerate(range(item.start, last)) if row < len(item.token_ids)
            ]
        if item.samples:
            samples.append(len(tokens) - 1)
        row = inputs.block_tables[index]
        assert row[: len(item.block_table)].tolist() == list(item.block_table)
        assert (row[len(item.block_table) :] == NO_BLOCK).all()
    assert inputs.token_ids.tolist() == tokens
    assert inputs.positions.tolist() == positions
    assert inputs.row_starts.tolist() == starts
    assert inputs.sample_rows.tolist() == samples
    for array in (inputs.token_ids, inputs.positions, inputs.row_starts, inputs.block_tables, inputs.sample_rows):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous


SEQUENCE = st.tuples(
    st.integers(0, 200),  # sequence
    st.integers(0, 30),  # start
    st.integers(1, 9),  # rows
    st.booleans(),  # samples
    st.integers(0, 40),  # spare blocks
    st.booleans(),  # whether the table is a new object
)


@given(st.lists(st.tuples(st.lists(SEQUENCE, max_size=5, unique_by=lambda s: s[0]), st.booleans()), max_size=8))
def test_equals_the_twin_over_many_steps(steps: list) -> None:
    arrays = StepArrays(BLOCK)
    tables: dict[int, tuple[int, ...]] = {}
    req = request((1,))
    for sequences, forget in steps:
        entries = []
        for seq_id, start, rows, samples, spare, renew in sequences:
            need = -(-(start + rows) // BLOCK) + spare
            if renew or len(tables.get(seq_id, ())) < need - spare:
                tables[seq_id] = tuple(range(1000 * seq_id, 1000 * seq_id + need))
            tokens = tuple(range(start + rows + (not samples)))
            entries.append(entry(req, tokens, start, rows, tables[seq_id], seq_id=seq_id))
        check(arrays, plan(*entries))
        if forget and entries:
            arrays.forget(entries[0].seq_id)
            del tables[entries[0].seq_id]


def test_many_sequences_and_long_tables_fit() -> None:
    arrays, req = StepArrays(BLOCK), request((1,))
    entries = [entry(req, (5,) * (seq + 1), seq, 1, tuple(range(seq + 1)), seq_id=seq) for seq in range(150)]
    check(arrays, plan(*entries))
    for seq in range(0, 150, 2):
        arrays.forget(seq)
    check(arrays, plan(*(item for item in entries if item.seq_id % 2)))
    fresh = [entry(req, (5,), 0, 1, (seq,), seq_id=seq) for seq in range(200, 280)]
    check(arrays, plan(*(item for item in entries if item.seq_id % 2), *fresh))


def test_a_shorter_table_leaves_nothing_behind() -> None:
    arrays, req = StepArrays(BLOCK), request((1,))
    check(arrays, plan(entry(req, (1,) * 12, 0, 12, (7, 8, 9))))
    check(arrays, plan(entry(req, (1,) * 3, 0, 3, (4,))))


def test_another_table_of_the_same_length_is_read() -> None:
    arrays, req = StepArrays(BLOCK), request((1,))
    for table in ((7, 8), (7, 9), (3, 9)):
        check(arrays, plan(entry(req, (1,) * 3, 0, 3, table)))


@pytest.mark.parametrize(("start", "rows"), [(8, 1), (7, 2), (0, 9)])
def test_rows_past_the_table_are_refused(start: int, rows: int) -> None:
    arrays, req = StepArrays(BLOCK), request((1,))
    good = entry(req, (1,) * 8, 7, 1, (0, 1), seq_id=1)
    check(arrays, plan(good))
    bad = entry(req, (1,) * 9, start, rows, (2, 3), seq_id=2)
    message = rf"sequence 2: rows \[{start}, {start + rows}\) do not fit its 2 blocks of 4"
    with pytest.raises(KernelError, match=message):
        arrays.to_step_inputs(plan(good, bad))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 8), st.integers(1, 9)), min_size=1, max_size=5))
def test_scored_rows_are_wanted_too(shapes: list[tuple[int, int, int]]) -> None:
    entries = []
    for seq_id, (length, latest, most) in enumerate(shapes):
        prompt = tuple(range(length))
        start = min(latest, length - 1)
        item = entry(request(prompt), prompt, start, min(most, length - start), (0, 1, 2), seq_id=seq_id)
        entries.append(item._replace(scores=seq_id % 2 == 0 and start < length - 1))
    check(StepArrays(BLOCK), plan(*entries))


def test_forgetting_an_unknown_sequence_is_nothing() -> None:
    StepArrays(BLOCK).forget(42)


def test_an_empty_plan_gives_empty_arrays() -> None:
    check(StepArrays(BLOCK), plan())
