"""The native sampler against its NumPy twin, against itself in other batches, and against probability theory."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_sampler import NativeSampler
from numpy.typing import NDArray
from sampling_cases import agreeing_tokens, entry, repeated

from shoal.core.params import SamplingParams
from shoal.core.plan import StepEntry
from shoal.sampling.batch import SamplingBatch, pack
from shoal.sampling.reference import adjust, distribution, log_softmax, ranking, sample, sample_rows
from shoal.sampling.results import SampledRows, SampleStatus

INF = np.float32(np.inf)
VOCABS = [1, 2, 15, 16, 17, 255, 256, 257, 1000, 3001]


def check(logits: NDArray[np.float32], batch: SamplingBatch, sampled: SampledRows) -> int:
    """Native results agree with the twin's; how many tokens differ within the rule of ``agreeing_tokens``."""
    differing = 0
    for row, result in enumerate(sampled.results):
        twin = sample(logits[row], batch, row)
        assert SampleStatus(result["status"]) == twin.status
        if twin.status is not SampleStatus.OK:
            assert result["token"] == -1
            continue
        if result["token"] != twin.token:
            assert batch.rows[row]["temperature"] > 0
            assert result["token"] in agreeing_tokens(logits[row], batch, row)
            differing += 1
        wanted = int(batch.rows[row]["num_logprobs"])
        if wanted < 0:
            assert math.isnan(result["logprob"])
        else:
            assert result["logprob"] == pytest.approx(log_softmax(logits[row])[result["token"]], rel=1e-6, abs=1e-5)
        assert result["num_top"] == len(twin.top)
        top = sampled.top_ids[row, : len(twin.top)].tolist()
        assert top == [token for token, _ in twin.top]
        np.testing.assert_allclose(
            sampled.top_logprobs[row, : len(twin.top)], [value for _, value in twin.top], rtol=1e-6, atol=1e-5
        )
    return differing


@st.composite
def rows(draw: st.DrawFn) -> tuple[NDArray[np.float32], list[StepEntry]]:
    """A few rows with every feature mixed in, ties and impossible tokens included."""
    vocab = draw(st.sampled_from(VOCABS))
    count = draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = rng.standard_normal((count, vocab)) * draw(st.sampled_from([0.01, 1.0, 3.0, 30.0]))
    step = draw(st.sampled_from([0.0, 0.0, 0.5, 4.0]))
    if step:
        logits = np.round(logits / step) * step
    logits[rng.random(logits.shape) < draw(st.sampled_from([0.0, 0.0, 0.3, 0.99]))] = -np.inf
    entries = []
    for row in range(count):
        params = SamplingParams(
            temperature=draw(st.sampled_from([0.0, 1.0, 1.0, 0.3, 2.0, 1e-6])),
            top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 40, 300, 10**6])),
            top_p=draw(st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9, 0.999])),
            min_p=draw(st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.5])),
            presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -2.0])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -0.3])),
            logit_bias={
                int(token): draw(st.sampled_from([-100.0, 1.5, 100.0]))
                for token in rng.integers(vocab, size=draw(st.integers(0, 3)))
            },
            logprobs=draw(st.sampled_from([None, 0, 1, 5, 64])),
            min_tokens=draw(st.sampled_from([0, 3])),
        )
        entries.append(
            entry(
                params,
                seq_id=row,
                seed=draw(st.integers(0, 2**64 - 1)),
                position=draw(st.integers(1, 2**40)),
                prompt=tuple(rng.integers(vocab, size=draw(st.integers(1, 20))).tolist()),
                generated=tuple(rng.integers(vocab, size=draw(st.integers(0, 20))).tolist()),
                stop_ids=frozenset(rng.integers(vocab, size=draw(st.integers(0, 3))).tolist()),
            )
        )
    return logits.astype(np.float32), entries


@settings(max_examples=250, deadline=None)
@given(case=rows())
def test_native_agrees_with_its_twin(
    samplers: dict[str, NativeSampler], case: tuple[NDArray[np.float32], list[StepEntry]]
) -> None:
    logits, entries = case
    batch = pack(entries)
    results = {isa: sampler(logits, batch) for isa, sampler in samplers.items()}
    check(logits, batch, results["portable"])
    for sampled in results.values():
        assert_same_bits(sampled, results["portable"])


@settings(max_examples=100, deadline=None)
@given(case=rows(), data=st.data())
def test_a_row_does_not_depend_on_its_neighbours(
    samplers: dict[str, NativeSampler], case: tuple[NDArray[np.float32], list[StepEntry]], data: st.DataObject
) -> None:
    logits, entries = case
    native = samplers["portable"]
    together = native(logits, pack(entries))
    order = data.draw(st.permutations(range(len(entries))))
    shuffled = native(logits[order], pack([entries[row] for row in order]))
    for place, row in enumerate(order):
        alone = native(logits[row : row + 1], pack([entries[row]]))
        for sampled, at in ((together, row), (shuffled, place)):
            assert sampled.results[at].tobytes() == alone.results[0].tobytes()
            top = int(alone.results[0]["num_top"])
            assert sampled.top_ids[at, :top].tobytes() == alone.top_ids[0, :top].tobytes()
            assert sampled.top_logprobs[at, :top].tobytes() == alone.top_logprobs[0, :top].tobytes()


SETTINGS = {
    "greedy": SamplingParams(temperature=0, logprobs=5),
    "plain": SamplingParams(logprobs=0),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(top_k=40, logprobs=20),
    "top_k large": SamplingParams(top_k=1000),
    "top_k huge": SamplingParams(top_k=20_000, top_p=0.9),
    "top_p": SamplingParams(top_p=0.9),
    "top_p high": SamplingParams(top_p=0.9999),
    "top_p low": SamplingParams(top_p=0.01),
    "min_p": SamplingParams(min_p=0.05),
    "all": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.1, logprobs=3),
}


def shapes(rng: np.random.Generator, vocab: int) -> dict[str, NDArray[np.float32]]:
    """Rows of typical and of difficult distributions."""
    ranks = rng.permutation(vocab) + 1.0
    made = {
        "normal": rng.standard_normal(vocab) * 3,
        "flat": rng.standard_normal(vocab) * 0.01,
        "zipf": -1.1 * np.log(ranks),
        "peaked": np.where(ranks == 1, 30.0, rng.standard_normal(vocab)),
        "constant": np.zeros(vocab),
        "two levels": np.where(ranks < vocab / 3, 1.0, 0.0),
        "coarse": np.round(rng.standard_normal(vocab) * 2),
        "wide": rng.standard_normal(vocab) * 1000,
    }
    return {name: values.astype(np.float32) for name, values in made.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_large_vocabulary(samplers: dict[str, NativeSampler], name: str) -> None:
    """At real sizes the twin's own token comes out practically always; all instruction sets give the same bits."""
    logits = np.stack([*shapes(np.random.default_rng(1), 49_152).values()] * 4)
    params = SETTINGS[name]
    batch = pack([entry(params, seed=row, prompt=(3, 1, 4), generated=(1, 5, 9)) for row in range(len(logits))])
    results = {isa: sampler(logits, batch) for isa, sampler in samplers.items()}
    assert check(logits, batch, results["portable"]) <= 1
    for sampled in results.values():
        assert_same_bits(sampled, results["portable"])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7, top_k=12),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.3, top_k=30, top_p=0.9, min_p=0.05, logit_bias={3: 1.0}),
    ],
)
def test_frequencies(native: NativeSampler, params: SamplingParams) -> None:
    """Pearson's statistic over 40,000 draws stays within five standard deviations of its mean."""
    draws = 40_000
    logits = np.random.default_rng(2).standard_normal(60).astype(np.float32) * np.float32(1.5)
    batch = repeated(params, draws, seed=5)
    sampled = native(np.tile(logits, (draws, 1)), batch)
    counts = np.bincount(sampled.results["token"], minlength=60)
    weights = distribution(
        adjust(logits, batch, 0),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
    )
    possible = weights > 0
    assert counts[~possible].sum() == 0
    expected = draws * weights / weights.sum()
    # Pearson's statistic wants at least a few expected in each class: the rare tokens are one class.
    rare = possible & (expected < 10)
    classes = possible & ~rare
    seen, wanted = counts[classes].astype(np.float64), expected[classes]
    if rare.any():
        seen, wanted = np.append(seen, counts[rare].sum()), np.append(wanted, expected[rare].sum())
    freedom = len(seen) - 1
    assert freedom >= 5
    assert ((seen - wanted) ** 2 / wanted).sum() < freedom + 5 * math.sqrt(2 * freedom)


HAND_MADE = [
    # The token that reaches top_p is the last one kept; equal probabilities go to the lower id first.
    (SamplingParams(top_p=0.01), {1}),
    (SamplingParams(top_p=0.39), {1}),
    (SamplingParams(top_p=0.41), {1, 2}),
    (SamplingParams(top_p=0.59), {1, 2}),
    (SamplingParams(top_p=0.61), {1, 2, 3}),
    (SamplingParams(top_p=0.95), {0, 1, 2, 3, 4}),
    (SamplingParams(top_k=2), {1, 2}),
    (SamplingParams(top_k=4), {0, 1, 2, 3}),
    (SamplingParams(min_p=0.45), {1, 2, 3}),
    (SamplingParams(min_p=0.55), {1}),
    # Top-p is a share of what top-k leaves, (2/3, 1/3): 0.6 falls short of nothing but the first.
    (SamplingParams(top_k=2, top_p=0.6), {1}),
    # Min-p does not change what top-p is a share of: after min-p alone (1/2, 1/4, 1/4) two would do.
    (SamplingParams(min_p=0.45, top_p=0.7), {1, 2, 3}),
    # Truncation comes after the temperature: at 1/2 the first has 0.16 of 0.26.
    (SamplingParams(temperature=0.5, top_p=0.6), {1}),
    (SamplingParams(temperature=0.5, min_p=0.45), {1}),
]


@pytest.mark.parametrize(("params", "kept"), HAND_MADE)
def test_hand_made_probabilities(native: NativeSampler, params: SamplingParams, kept: set[int]) -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.2, 0.1], np.float32))
    assert tokens_of(native, logits, params) == kept


@pytest.mark.parametrize(("params", "kept"), HAND_MADE)
def test_hand_made_probabilities_in_the_twin(params: SamplingParams, kept: set[int]) -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.2, 0.1], np.float32))
    assert tokens_of(None, logits, params) == kept


def test_nucleus_of_equal_tokens_is_the_first_ids(native: NativeSampler) -> None:
    vocab = 20_000
    logits = np.zeros((300, vocab), np.float32)
    tokens = native(logits, repeated(SamplingParams(top_p=0.25), 300)).results["token"]
    assert tokens.max() < vocab // 4
    assert tokens.max() > vocab // 5


def test_top_k_one_is_greedy(native: NativeSampler) -> None:
    logits = np.round(np.random.default_rng(3).standard_normal((50, 1000)) * 2).astype(np.float32)
    greedy = native(logits, repeated(SamplingParams(temperature=0), 50)).results["token"]
    assert greedy.tolist() == native(logits, repeated(SamplingParams(top_k=1), 50)).results["token"].tolist()
    assert greedy.tolist() == np.argmax(logits, axis=1).tolist()


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-6])
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_tiny_temperatures_are_greedy(native: NativeSampler, temperature: float, scale: float) -> None:
    logits = (np.random.default_rng(4).standard_normal((20, 999)) * scale).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1)
    assert native(logits, repeated(params, 20)).results["token"].tolist() == np.argmax(logits, axis=1).tolist()


def test_a_row_of_extreme_logits(native: NativeSampler) -> None:
    largest = np.finfo(np.float32).max
    logits = np.array([[-largest, largest, 0, -INF, largest, -0.0]], np.float32)
    assert tokens_of(native, logits[0], SamplingParams(temperature=100.0)) == {1, 4}
    lowest = SamplingParams(
        temperature=0, repetition_penalty=1e-30, presence_penalty=100, logit_bias={1: 1000.0, 3: 1000.0}, logprobs=64
    )
    batch = pack([entry(lowest, prompt=(0, 1, 2, 3, 4, 5), generated=(3, 4))])
    sampled = native(logits, batch)
    assert check(logits, batch, sampled) == 0
    assert sampled.results["token"].tolist() == [1]
    assert sampled.results["num_top"].tolist() == [5]
    assert sampled.top_ids[0, :5].tolist() == [1, 4, 2, 5, 0]  # -0 and +0 tie


def test_only_the_guilty_row_fails(native: NativeSampler) -> None:
    vocab = 300
    logits = np.random.default_rng(5).standard_normal((8, vocab)).astype(np.float32)
    logits[1, 299] = np.nan
    logits[2, 17] = INF
    logits[3] = -INF
    logits[4, 299] = -np.nan
    plain = entry(SamplingParams(logprobs=2))
    everything = SamplingParams(min_tokens=1)
    entries = [plain] * 5 + [
        entry(everything, stop_ids=frozenset(range(vocab))),
        entry(everything, stop_ids=frozenset({vocab})),
        plain,
    ]
    batch = pack(entries)
    sampled = native(logits, batch)
    status = [SampleStatus(value) for value in sampled.results["status"]]
    assert status == [
        SampleStatus.OK,
        SampleStatus.NOT_FINITE,
        SampleStatus.NOT_FINITE,
        SampleStatus.NO_CANDIDATE,
        SampleStatus.NOT_FINITE,
        SampleStatus.NO_CANDIDATE,
        SampleStatus.BAD_ID,
        SampleStatus.OK,
    ]
    check(logits, batch, sampled)


@pytest.mark.parametrize("where", ["bias", "banned", "history"])
@pytest.mark.parametrize("token", [-1, 40, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused(native: NativeSampler, where: str, token: int) -> None:
    params = SamplingParams(repetition_penalty=1.5, logit_bias={1: 1.0}, min_tokens=5)
    batch = pack([entry(params, prompt=(1,), generated=(2,), stop_ids=frozenset({3}))] * 2)
    flat = {"bias": "bias_ids", "banned": "banned_ids", "history": "history"}[where]
    changed = getattr(batch, flat).copy()
    changed[-1] = token
    batch = replace(batch, **{flat: changed})
    logits = np.zeros((2, 40), np.float32)
    sampled = native(logits, batch)
    assert sampled.results["status"].tolist() == [SampleStatus.OK, SampleStatus.BAD_ID]
    assert check(logits, batch, sampled) == 0


def test_bans_hold_whatever_the_bias(native: NativeSampler) -> None:
    params = SamplingParams(temperature=0, logit_bias={3: 1000.0}, min_tokens=1)
    batch = pack([entry(params, stop_ids=frozenset({3}), num_generated=n) for n in (0, 1)])
    logits = np.array([[0, 0, 1, 5]] * 2, np.float32)
    assert native(logits, batch).results["token"].tolist() == [2, 3]


def test_penalties_count_what_they_should(native: NativeSampler) -> None:
    """Repetition touches prompt and output once each token; presence and frequency the output only."""
    logits = np.array([[2.0, 2.0, 2.0, -2.0, 1.75]], np.float32)

    def best(**changes: float) -> int:
        params = SamplingParams(temperature=0, **changes)
        batch = pack([entry(params, prompt=(0, 0), generated=(1, 1, 1, 3))])
        token = int(native(logits, batch).results["token"][0])
        assert token == sample(logits[0], batch, 0).token
        return token

    assert best() == 0
    assert best(repetition_penalty=1.2) == 2
    assert best(presence_penalty=1.0) == 0  # prompt tokens go free
    assert best(presence_penalty=-1.0) == 1
    assert best(frequency_penalty=-0.5) == 1
    assert best(repetition_penalty=0.25) == 0
    adjusted = adjust(
        logits[0],
        pack(
            [
                entry(
                    SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25),
                    prompt=(0, 0),
                    generated=(1, 1, 1, 3),
                )
            ]
        ),
        0,
    )
    assert adjusted.tolist() == [1.0, 1.0 - 0.5 - 0.75, 2.0, -4.0 - 0.5 - 0.25, 1.75]


@pytest.mark.parametrize("seed", range(20))
def test_adjusted_logits_are_exact(native: NativeSampler, seed: int) -> None:
    """Native code adjusts to the twin's very bits: token 0 wins with that logit and loses with the float below."""
    rng = np.random.default_rng(seed)
    repetition, presence, frequency = rng.uniform(0.5, 2), rng.uniform(-2, 2), rng.uniform(-2, 2)
    params = SamplingParams(
        temperature=0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias={2: rng.uniform(-3, 3), 4: rng.uniform(-3, 3)},
    )
    for token in range(1, 6):
        # 1: untouched; 2: bias; 3: prompt; 4: output, and bias; 5: both
        batch = pack([entry(params, prompt=(3, 3, 5), generated=(4, 5, 4, 5, 5))])
        logits = np.full(6, -np.float32(1e30))
        logits[token] = rng.uniform(-3, 3)
        value = adjust(logits, batch, 0)[token]
        for ruler, winner in ((value, 0), (np.nextafter(value, -INF), token)):
            logits[0] = ruler
            assert native(logits[None], batch).results["token"].tolist() == [winner]


def test_nothing_makes_the_impossible_possible(native: NativeSampler) -> None:
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=-5.0, frequency_penalty=-5.0, logit_bias={0: 100.0}, min_tokens=5
    )
    batch = pack([entry(params, prompt=(0, 1), generated=(0, 2), stop_ids=frozenset({3}))])
    logits = np.array([[-INF, -INF, -INF, 0.0]], np.float32)
    assert native(logits, batch).results["status"].tolist() == [SampleStatus.NO_CANDIDATE]
    assert check(logits, batch, native(logits, batch)) == 0


def test_seeds(native: NativeSampler) -> None:
    """Same (seed, index, position): same token. Another of any: another stream."""
    logits = np.zeros((64, 1000), np.float32)

    def tokens(seed: int, index: int, start: int) -> list[int]:
        entries = [entry(SamplingParams(), seed=seed, index=index, position=start + i) for i in range(64)]
        return list(native(logits, pack(entries)).results["token"].tolist())

    assert tokens(1, 0, 1) == tokens(1, 0, 1)
    assert tokens(1, 0, 1)[32:] == tokens(1, 0, 33)[:32]
    for other in (tokens(2, 0, 1), tokens(1, 1, 1), tokens(1, 0, 100)):
        assert sum(a == b for a, b in zip(tokens(1, 0, 1), other, strict=True)) <= 3


def test_twin_in_a_batch(native: NativeSampler) -> None:
    """``sample_rows`` fills the same arrays as native code does."""
    logits = np.random.default_rng(6).standard_normal((5, 100)).astype(np.float32)
    batch = pack([entry(SamplingParams(logprobs=k), seed=k or 0) for k in (None, 0, 3, 7, None)])
    sampled, twin = native(logits, batch), sample_rows(logits, batch)
    np.testing.assert_array_equal(sampled.results["token"], twin.results["token"])
    np.testing.assert_array_equal(sampled.results["num_top"], twin.results["num_top"])
    np.testing.assert_array_equal(sampled.top_ids, twin.top_ids)
    np.testing.assert_allclose(sampled.top_logprobs, twin.top_logprobs, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.floats(-60, 60, width=32) | st.just(-math.inf), min_size=1, max_size=300),
    count=st.integers(0, 8),
    data=st.data(),
)
def test_a_given_token_has_its_log_probability(
    native: NativeSampler, logits: list[float], count: int, data: st.DataObject
) -> None:
    row = np.array([logits], np.float32)
    given_token = data.draw(st.integers(0, len(logits) - 1 + 2))
    params = SamplingParams(prompt_logprobs=count)
    batch = pack([entry(params, prompt=(0, given_token))._replace(start=0, scores=True, samples=False)])
    sampled, twin = native(row, batch), sample_rows(row, batch)
    assert sampled.results["token"].tolist() == twin.results["token"].tolist()
    assert sampled.results["status"].tolist() == twin.results["status"].tolist()
    assert sampled.top_ids.tolist() == twin.top_ids.tolist()
    np.testing.assert_allclose(sampled.results["logprob"], twin.results["logprob"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sampled.top_logprobs, twin.top_logprobs, rtol=1e-5, atol=1e-5)
    if np.isneginf(row).all():
        assert sampled.results["status"][0] == SampleStatus.NO_CANDIDATE
    elif given_token >= len(logits):
        assert sampled.results["status"][0] == SampleStatus.BAD_ID
    else:
        assert sampled.results["token"][0] == given_token
        assert math.isfinite(sampled.results["logprob"][0])


def test_exponential(native: NativeSampler) -> None:
    x = -np.concatenate([np.linspace(0, 87, 400_001), np.geomspace(1e-30, 87, 100_001)]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    ulps = np.abs(native.exp(x).astype(np.float64) - exact) / np.spacing(exact.astype(np.float32))
    assert ulps.max() < 2
    ends = np.array([0.0, -0.0, -87.01, -1e10, -INF], np.float32)
    assert native.exp(ends).tolist() == [1, 1, 0, 0, 0]


def test_logarithm(native: NativeSampler) -> None:
    for x in [*np.geomspace(1.0, 1e7, 3000), 1.0, 2.0, math.sqrt(2), math.nextafter(2, 1), 0.75]:
        assert native.log(float(x)) == pytest.approx(math.log(x), rel=1e-15, abs=4e-16)


def assert_same_bits(one: SampledRows, other: SampledRows) -> None:
    assert one.results.tobytes() == other.results.tobytes()
    assert one.top_ids.tobytes() == other.top_ids.tobytes()
    assert one.top_logprobs.tobytes() == other.top_logprobs.tobytes()


def tokens_of(native: NativeSampler | None, logits: NDArray[np.float32], params: SamplingParams) -> set[int]:
    """Every token that 400 draws give."""
    batch = repeated(params, 400)
    tiled = np.tile(logits, (400, 1))
    sampled = sample_rows(tiled, batch) if native is None else native(tiled, batch)
    return set(sampled.results["token"].tolist())


def test_ranking_prefers_the_lower_id() -> None:
    assert ranking(np.array([1.0, 2.0, -INF, 2.0, 1.0], np.float32)).tolist() == [1, 3, 0, 4, 2]


@settings(max_examples=100, deadline=None)
@given(case=rows(), share=st.sampled_from([0.0, 0.001, 0.3, 0.999, 1.0]), seed=st.integers(0, 2**32))
def test_masks_agree_with_the_twin_and_hold(
    samplers: dict[str, NativeSampler],
    case: tuple[NDArray[np.float32], list[StepEntry]],
    share: float,
    seed: int,
) -> None:
    logits, entries = case
    entries = [item._replace(seq_id=number) for number, item in enumerate(entries)]
    vocab = logits.shape[1]
    rng = np.random.default_rng(seed)
    allowed = rng.random((len(entries), vocab)) < share
    words = np.zeros((len(entries), 32 * (vocab // 32 + 1)), np.bool_)
    words[:, :vocab] = allowed
    words[:, vocab:] = True  # bits behind the vocabulary mean nothing
    masks = np.packbits(words, axis=1, bitorder="little").view("<u4").astype(np.uint32)
    masked = {number: number for number in range(0, len(entries), 2)}  # every second row is free
    batch = pack(entries, masks, masked)
    results = {isa: native(logits, batch) for isa, native in samplers.items()}
    check(logits, batch, results["portable"])
    free = samplers["portable"](logits, pack(entries))
    for row, result in enumerate(results["portable"].results):
        if row not in masked:
            assert result.tobytes() == free.results[row].tobytes()
        elif result["status"] == SampleStatus.OK:
            assert allowed[row, result["token"]]
    for sampled in results.values():
        assert_same_bits(sampled, results["portable"])


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 50.0])
def test_a_masked_favourite_is_never_chosen(native: NativeSampler, temperature: float) -> None:
    logits = np.full((200, 40), -20.0, np.float32)
    logits[:, 7] = 100.0
    logits[:, 33] = 0.0
    batch = repeated(SamplingParams(temperature=temperature, logit_bias={7: 100.0}, logprobs=1), 200)
    everything_else = np.array([[~(1 << 7) & 0xFFFFFFFF, 0xFFFFFFFF]], np.uint32)
    rows_masked = batch.rows.copy()
    rows_masked["mask"] = 1
    sampled = native(logits, replace(batch, rows=rows_masked, masks=everything_else))
    assert 7 not in sampled.results["token"]
    # Log-probabilities are the model's own: the forbidden token is still the most likely one.
    assert set(sampled.top_ids[:, 0].tolist()) == {7}
