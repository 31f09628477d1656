import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from native_sampler import NativeSampler
from sampling_cases import entry

from shoal.core.params import SamplingParams
from shoal.core.plan import EntryResult, StepEntry, TokenLogprobs
from shoal.sampling.batch import SAMPLE_PARAMS, SAMPLE_RESULT, SamplingBatch, SamplingPacker, pack
from shoal.sampling.results import SampledRows, SampleStatus, entry_results
from shoal.sampling.rng import completion_seed


@pytest.mark.parametrize(("name", "dtype"), [("params", SAMPLE_PARAMS), ("result", SAMPLE_RESULT)])
def test_layout_equals_the_native_struct(native: NativeSampler, name: str, dtype: np.dtype[np.void]) -> None:
    assert dtype.names is not None
    assert dtype.fields is not None
    offsets = [dtype.fields[field][1] for field in dtype.names]
    assert [*offsets, dtype.itemsize] == native.layout(name, len(offsets))


def test_every_field_arrives() -> None:
    params = SamplingParams(
        temperature=0.75,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=2.0,
        logit_bias={7: -1.0, 4: 2.5},
        logprobs=2,
        min_tokens=3,
    )
    other = entry(SamplingParams(logit_bias={1: 1.0}), seq_id=5)
    row_entry = entry(
        params,
        seq_id=6,
        index=2,
        seed=11,
        position=42,
        prompt=(1, 2),
        generated=(2, 3),
        stop_ids=frozenset({9, 8}),
    )
    batch = pack([other, other._replace(samples=False), row_entry])
    assert len(batch.rows) == 2
    row = batch.rows[1]
    assert row["temperature"] == 0.75
    assert (row["top_k"], row["top_p"], row["min_p"]) == (3, 0.5, 0.25)
    assert (row["repetition"], row["presence"], row["frequency"]) == (1.5, -0.5, 2.0)
    assert (row["num_logprobs"], row["seed"], row["position"]) == (2, completion_seed(11, 2), 42)
    assert _part(batch, 1, "bias", batch.bias_ids) == [4, 7]
    assert _part(batch, 1, "bias", batch.bias_values) == [2.5, -1.0]
    assert _part(batch, 1, "banned", batch.banned_ids) == [8, 9]
    assert _part(batch, 1, "history", batch.history) == [1, 2, 2, 3]
    assert row["num_prompt"] == 2
    assert batch.max_logprobs == 2
    assert _part(batch, 0, "bias", batch.bias_ids) == [1]
    assert batch.rows[0]["num_logprobs"] == -1


def test_position_of_a_prompt_chunk_is_one_past_its_rows() -> None:
    chunk = entry(SamplingParams())._replace(start=16, token_ids=(1, 2, 3))
    assert pack([chunk]).rows["position"].tolist() == [19]


def test_stop_ids_are_banned_below_min_tokens_only() -> None:
    params = SamplingParams(min_tokens=2)
    counts = [
        int(pack([entry(params, num_generated=n, stop_ids=frozenset({1, 2}))]).rows["banned_count"][0])
        for n in range(4)
    ]
    assert counts == [2, 2, 0, 0]


def test_tiny_values_do_not_become_zero() -> None:
    row = pack([entry(SamplingParams(temperature=1e-300, top_p=1e-300, min_p=1e-300, repetition_penalty=1e-300))]).rows[
        0
    ]
    for name in ("temperature", "top_p", "min_p", "repetition"):
        assert row[name] == np.finfo(np.float32).tiny
    assert pack([entry(SamplingParams(temperature=0))]).rows["temperature"][0] == 0


def test_no_rows() -> None:
    batch = pack([entry(SamplingParams(), samples=False)])
    assert len(batch.rows) == 0
    assert entry_results((), batch, SampledRows.empty(batch)) == []
    assert entry_results([entry(SamplingParams(), samples=False)], batch, SampledRows.empty(batch)) == [EntryResult()]


PARAMS = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    logit_bias=st.dictionaries(st.integers(0, 50), st.floats(-5, 5), max_size=3),
    min_tokens=st.integers(0, 3),
    logprobs=st.sampled_from([None, 0, 4]),
)


@given(st.lists(PARAMS, min_size=1, max_size=4), st.data())
def test_a_packer_with_memory_equals_a_fresh_one(params: list[SamplingParams], data: st.DataObject) -> None:
    """Sequences grow, vanish, come back shorter under the same id, or under the same id with other parameters."""
    packer = SamplingPacker()
    base = [
        entry(item, seq_id=i, seed=i, prompt=(1, 2, i), stop_ids=frozenset({7, 3})) for i, item in enumerate(params)
    ]
    generated: list[tuple[int, ...]] = [()] * len(params)
    for _ in range(data.draw(st.integers(1, 8))):
        plan: list[StepEntry] = []
        for i in range(len(base)):
            match data.draw(st.sampled_from(["grow", "grow", "again", "skip", "forget", "restart", "replace"])):
                case "grow":
                    generated[i] += tuple(data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=70)))
                case "skip":
                    continue
                case "forget":
                    packer.forget(i)
                case "restart":
                    generated[i] = ()
                case "replace":
                    base[i] = entry(data.draw(PARAMS), seq_id=i, seed=99, prompt=(5,))
                    generated[i] = ()
            one = base[i]
            history = one.request.prompt_ids + generated[i] if one.request.params.penalized else ()
            plan.append(one._replace(start=9 + len(generated[i]), num_generated=len(generated[i]), history=history))
        remembered, fresh = packer.pack(plan), pack(plan)
        assert remembered.rows.tobytes() == fresh.rows.tobytes()
        for name in ("bias_ids", "bias_values", "banned_ids", "history"):
            np.testing.assert_array_equal(getattr(remembered, name), getattr(fresh, name), strict=True)
        assert remembered.max_logprobs == fresh.max_logprobs


def test_a_batch_is_not_changed_by_the_next_one() -> None:
    packer = SamplingPacker()
    params = SamplingParams(repetition_penalty=1.5)
    first = packer.pack([entry(params, generated=(5, 6))])
    packer.pack([entry(params, generated=(8, 9, 10))])
    assert first.history.tolist() == [0, 5, 6]


def test_forget_drops_what_is_kept() -> None:
    packer = SamplingPacker()
    packer.pack([entry(SamplingParams(), seq_id=1), entry(SamplingParams(), seq_id=2)])
    assert len(packer) == 2
    packer.forget(1)
    packer.forget(1)
    packer.forget(77)
    assert len(packer) == 1


def test_entry_results() -> None:
    entries = [entry(SamplingParams(logprobs=k), samples=k != 1) for k in (None, 1, 0, 2, None)]
    batch = pack(entries)
    sampled = SampledRows.empty(batch)
    sampled.results[:] = [
        (4, 0, np.nan, 0),
        (5, 0, -0.5, 0),
        (6, 0, -1.5, 2),
        (-1, SampleStatus.NOT_FINITE, np.nan, 0),
    ]
    sampled.top_ids[2] = (1, 6)
    sampled.top_logprobs[2] = (-0.25, -1.5)
    assert entry_results(entries, batch, sampled) == [
        EntryResult((4,)),
        EntryResult(),
        EntryResult((5,), (TokenLogprobs(-0.5, ()),)),
        EntryResult((6,), (TokenLogprobs(-1.5, ((1, -0.25), (6, -1.5))),)),
        EntryResult(error=SampleStatus.NOT_FINITE.message),
    ]


def scored_entry(start: int, rows: int, *, samples: bool) -> StepEntry:
    """Rows [start, start + rows) of the prompt 10, 11, 12, 13, 14, which is to be scored with two alternatives."""
    base = entry(SamplingParams(prompt_logprobs=2, logprobs=0), prompt=(10, 11, 12, 13, 14), samples=samples)
    return base._replace(start=start, token_ids=base.request.prompt_ids[start : start + rows], scores=start < 4)


@pytest.mark.parametrize(
    ("start", "rows", "given"), [(0, 2, [11, 12]), (2, 3, [13, 14]), (4, 1, []), (0, 5, [11, 12, 13, 14])]
)
def test_scored_rows_come_before_the_one_that_samples(start: int, rows: int, given: list[int]) -> None:
    plain = entry(SamplingParams(), seq_id=1)
    samples = start + rows == 5
    entries = [plain, scored_entry(start, rows, samples=samples), plain]
    batch = pack(entries)
    assert batch.rows["given"].tolist() == [-1, *given, *[-1] * samples, -1]
    assert batch.rows["position"].tolist() == [10, *given_positions(given), *[start + rows] * samples, 10]
    sampled = SampledRows.empty(batch)
    for row, token in enumerate(batch.rows["given"].tolist()):
        sampled.results[row] = (max(token, 0), 0, -float(row), 1 if token >= 0 else 0)
    sampled.top_ids[:, :1] = 7
    first, scored, last = entry_results(entries, batch, sampled)
    assert first == last == EntryResult((0,))
    assert [item.logprob for item in scored.prompt_logprobs] == [-float(row) for row in range(1, 1 + len(given))]
    assert all(item.top == ((7, 0.0),) for item in scored.prompt_logprobs)
    assert scored.token_ids == ((0,) if samples else ())
    assert [item.logprob for item in scored.logprobs] == [-float(1 + len(given))] * samples


def given_positions(given: list[int]) -> list[int]:
    return [token - 10 for token in given]


def test_a_row_that_cannot_be_scored_fails_its_entry_only() -> None:
    plain = entry(SamplingParams(), seq_id=1)
    entries = [scored_entry(2, 3, samples=True), plain]
    batch = pack(entries)
    sampled = SampledRows.empty(batch)
    sampled.results["status"][1] = SampleStatus.NOT_FINITE
    assert entry_results(entries, batch, sampled) == [
        EntryResult(error=SampleStatus.NOT_FINITE.message),
        EntryResult((0,)),
    ]


def _part(batch: SamplingBatch, row: int, name: str, flat: np.ndarray) -> list[float]:
    start = int(batch.rows[row][f"{name}_start"])
    return flat[start : start + int(batch.rows[row][f"{name}_count"])].tolist()
