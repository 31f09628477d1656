import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from native_sampler import NativeSampler

from shoal.sampling.rng import completion_seed, philox4x32, uniform, uniforms

SEEDS = st.integers(-(2**63), 2**64 - 1)
POSITIONS = st.integers(0, 2**63 - 1)
DRAWS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the generator's published known-answer vectors
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == expected


def test_uniform_takes_the_first_53_bits() -> None:
    assert uniform(0, 0) == (0x6627E8D5E169C58D >> 11) / 2**53


@given(SEEDS, POSITIONS, DRAWS)
def test_uniform_is_a_53_bit_fraction_below_one(seed: int, position: int, draw: int) -> None:
    value = uniform(seed, position, draw)
    assert 0.0 <= value < 1.0
    assert (value * 2.0**53).is_integer()


@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=20), DRAWS)
def test_vectorised_equals_scalar(pairs: list[tuple[int, int]], draw: int) -> None:
    seeds = np.array([seed % 2**64 for seed, _ in pairs], np.uint64)
    positions = np.array([position for _, position in pairs], np.int64)
    assert uniforms(seeds, positions, draw).tolist() == [uniform(seed, position, draw) for seed, position in pairs]


def test_native_equals_python(native: NativeSampler) -> None:
    rng = np.random.default_rng(0)
    cases = [(0, 0, 0), (2**64 - 1, 2**63 - 1, 2**32 - 1), (1 << 32, 1 << 32, 1)]
    cases += [
        (int(rng.integers(2**64, dtype=np.uint64)), int(rng.integers(2**63)), int(rng.integers(4))) for _ in range(500)
    ]
    for case in cases:
        assert native.uniform(*case) == uniform(*case)


@given(st.integers(-(2**63), -1), st.integers(0, 127))
def test_negative_seed_counts_modulo_2_to_the_64(seed: int, index: int) -> None:
    assert completion_seed(seed, index) == completion_seed(seed % 2**64, index)


def test_completions_have_their_own_streams() -> None:
    seeds = {completion_seed(seed, index) for seed in range(100) for index in range(128)}
    assert len(seeds) == 100 * 128
    # A seed is not a draw of the same key at any near position.
    drawn = {uniform(seed, position, draw) for seed in range(3) for position in range(200) for draw in range(3)}
    assert not drawn & {(seed >> 11) * 2.0**-53 for seed in seeds}


def test_neighbouring_keys_give_uniform_and_unrelated_numbers() -> None:
    seeds, positions = np.arange(200, dtype=np.uint64)[:, None], np.arange(500, dtype=np.int64)[None, :]
    values = uniforms(seeds, positions)
    counts = np.bincount((values * 100).astype(np.int64).ravel(), minlength=100)
    assert ((counts - 1000.0) ** 2 / 1000.0).sum() < 99 + 5 * np.sqrt(2 * 99)
    noise = 5 / np.sqrt(values.size)
    for left, right in (
        (values[:-1], values[1:]),
        (values[:, :-1], values[:, 1:]),
        (values, uniforms(seeds, positions, 1)),
    ):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < noise
