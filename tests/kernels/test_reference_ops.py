"""Each reference operation against a twin in plain Python numbers, one scalar at a time, on odd shapes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import KernelError
from shoal.kernels.activation_groups import round_to_groups
from shoal.kernels.bfloat16 import round_to_bfloat16
from shoal.kernels.ops import AttentionSpec, RopeSpec, StepInputs, WeightTensor
from shoal.kernels.reference import ReferenceCache, ReferenceOps, ReferenceWeights

SEEDS = st.integers(0, 2**32 - 1)


def dequantize_f32(type_name: str, data: np.ndarray) -> np.ndarray:
    """All these weights are stored as float32; the type's name only says what they are to be taken for."""
    return data.reshape(len(data), -1).view(np.float32)


def weight(values: np.ndarray, name: str = "w", type_name: str = "F32") -> WeightTensor:
    values = np.ascontiguousarray(values, dtype=np.float32)
    rows = values.reshape(1, -1) if values.ndim == 1 else values
    return WeightTensor(name, type_name, values.shape, rows.view(np.uint8))


def step(lengths: list[int], starts: list[int], tables: np.ndarray, tokens: list[int] | None = None) -> StepInputs:
    rows = sum(lengths)
    positions = [start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)]
    row_starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return StepInputs(
        token_ids=np.array(tokens or [0] * rows, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        row_starts=row_starts,
        block_tables=tables.astype(np.int32),
        sample_rows=row_starts[1:] - np.int32(1),
    )


def simple_ops(rows: int, precision: str = "f32", tokens: list[int] | None = None) -> ReferenceOps:
    """Operations that need no cache, over one sequence of ``rows``."""
    cache = ReferenceCache(num_layers=1, num_blocks=1, block_size=16, num_kv_heads=1, head_dim=2)
    inputs = step([rows], [0], np.zeros((1, 1)), tokens)
    return ReferenceOps(inputs, cache, ReferenceWeights(dequantize_f32, precision))


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@given(SEEDS, st.integers(1, 9), st.integers(1, 40), st.integers(1, 20))
def test_embed_gives_rows(seed: int, rows: int, vocab: int, width: int) -> None:
    table = normal(seed, vocab, width)
    tokens = np.random.default_rng(seed).integers(0, vocab, rows).tolist()
    got = simple_ops(rows, tokens=tokens).embed(weight(table))
    for row, token in enumerate(tokens):
        assert got[row].tolist() == table[token].tolist()


@pytest.mark.parametrize("token", [-1, 3])
def test_embed_refuses_a_token_outside_the_table(token: int) -> None:
    with pytest.raises(KernelError, match=f"w: has 3 rows, got token {token}"):
        simple_ops(2, tokens=[0, token]).embed(weight(np.ones((3, 2))))


@given(SEEDS, st.integers(1, 9), st.integers(1, 70), st.sampled_from([1e-6, 1e-5, 0.5]))
def test_rms_norm(seed: int, rows: int, width: int, eps: float) -> None:
    x, scale = normal(seed, rows, width), normal(seed + 1, width)
    got = simple_ops(rows).rms_norm(x, weight(scale), eps)
    for row in range(rows):
        mean = math.fsum(float(value) ** 2 for value in x[row]) / width
        for column in range(width):
            expected = float(x[row, column]) / math.sqrt(mean + eps) * float(scale[column])
            assert got[row, column] == pytest.approx(expected, rel=1e-6, abs=1e-30)


def test_rms_norm_of_zeros_is_zero() -> None:
    got = simple_ops(2).rms_norm(np.zeros((2, 5), np.float32), weight(np.ones(5)), 1e-5)
    assert not got.any()


@settings(max_examples=40)
@given(
    SEEDS,
    st.integers(1, 35),
    st.integers(1, 70),
    st.lists(st.tuples(st.integers(1, 7), st.booleans()), min_size=1, max_size=3),
    st.sampled_from(
        [
            ("f32", "Q4_0", "as it is"),
            ("f32", "BF16", "as it is"),
            ("bf16", "Q4_0", "bf16"),
            ("bf16", "F32", "bf16"),
            ("native", "Q4_0", "groups"),
            ("native", "Q4_K", "groups"),
            ("native", "Q6_K", "groups"),
            ("native", "BF16", "bf16"),
            ("native", "F16", "as it is"),
            ("native", "F32", "as it is"),
        ]
    ),
)
def test_linear(
    seed: int, rows: int, width: int, parts: list[tuple[int, bool]], numerics: tuple[str, str, str]
) -> None:
    precision, type_name, sees = numerics
    x = normal(seed, rows, width)
    weights = [normal(seed + 1 + i, out, width) for i, (out, _) in enumerate(parts)]
    biases = [normal(seed + 9 + i, out) if biased else None for i, (out, biased) in enumerate(parts)]
    got = simple_ops(rows, precision).linear(
        x,
        tuple(weight(matrix, type_name=type_name) for matrix in weights),
        tuple(None if bias is None else weight(bias) for bias in biases),
    )
    seen = {"as it is": np.asarray, "bf16": round_to_bfloat16, "groups": round_to_groups}[sees](x)
    column = 0
    for matrix, bias in zip(weights, biases, strict=True):
        used = round_to_bfloat16(matrix) if precision == "bf16" else matrix
        if numerics[:2] == ("native", "Q6_K"):
            used = round_to_groups(matrix)
        for out in range(len(matrix)):
            for row in range(rows):
                products = [float(seen[row, i]) * float(used[out, i]) for i in range(width)]
                expected = math.fsum(products) + (0.0 if bias is None else float(bias[out]))
                slack = 1e-6 * (1 + sum(map(abs, products)))
                assert abs(float(got[row, column]) - expected) <= slack
            column += 1
    assert got.shape == (rows, column)
    assert got.dtype == np.float32


@pytest.mark.parametrize("precision", ["f32", "bf16", "native"])
def test_a_row_of_linear_is_the_same_in_any_company(precision: str) -> None:
    x, matrix = normal(0, 53, 200), normal(1, 301, 200)
    weights = (weight(matrix, type_name="Q4_0"),)
    together = simple_ops(53, precision).linear(x, weights)
    for row in range(53):
        alone = simple_ops(1, precision).linear(x[row : row + 1], weights)
        np.testing.assert_array_equal(alone[0], together[row])


def test_linear_refuses_what_does_not_fit() -> None:
    ops, x = simple_ops(1), np.ones((1, 4), np.float32)
    with pytest.raises(KernelError, match="narrow: takes 3 features, got 4"):
        ops.linear(x, (weight(np.ones((2, 3)), "narrow"),))
    with pytest.raises(KernelError, match="1 weights but 2 biases"):
        ops.linear(x, (weight(np.ones((2, 4))),), (None, None))


@given(SEEDS, st.integers(1, 9), st.integers(1, 33))
def test_silu_mul(seed: int, rows: int, half: int) -> None:
    x = normal(seed, rows, 2 * half) * np.float32(8)
    got = simple_ops(rows).silu_mul(x)
    for row in range(rows):
        for column in range(half):
            gate, up = float(x[row, column]), float(x[row, half + column])
            assert got[row, column] == pytest.approx(gate / (1 + math.exp(-gate)) * up, rel=2e-6, abs=1e-30)


def test_silu_of_huge_values_is_their_limit() -> None:
    x = np.array([[-1e30, 1e30, -200.0, 1.0, 1.0, 1.0]], dtype=np.float32)
    assert simple_ops(1).silu_mul(x)[0].tolist() == [0.0, float(np.float32(1e30)), 0.0]


def test_add_and_sample_rows() -> None:
    a, b = normal(0, 5, 3), normal(1, 5, 3)
    inputs = step([2, 3], [0, 0], np.array([[0], [1]]))
    cache = ReferenceCache(num_layers=1, num_blocks=2, block_size=16, num_kv_heads=1, head_dim=2)
    ops = ReferenceOps(inputs, cache, ReferenceWeights(dequantize_f32))
    np.testing.assert_array_equal(ops.add(a, b), a + b)
    np.testing.assert_array_equal(ops.sample_rows(a), a[[1, 4]])


# Rotation, cache and attention over paged blocks.


def rotated_twin(head: np.ndarray, position: int, rope: RopeSpec) -> list[float]:
    out = [float(value) for value in head]
    half = len(rope.inverse_frequencies)
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + half)
        angle = float(np.float32(position) * rope.inverse_frequencies[i])
        a, b = float(head[first]), float(head[second])
        out[first] = (a * math.cos(angle) - b * math.sin(angle)) * rope.scale
        out[second] = (b * math.cos(angle) + a * math.sin(angle)) * rope.scale
    return out


def attention_twin(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, *, eight_bits: bool = False
) -> list[float]:
    scores = [math.fsum(float(a) * float(b) for a, b in zip(query, key, strict=True)) * scale for key in keys]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = math.fsum(weights)
    if eight_bits:
        weights = round_weights_twin(weights, [float(np.abs(value).max()) / 127 for value in values])
    return [
        math.fsum(w * float(value[i]) for w, value in zip(weights, values, strict=True)) / total
        for i in range(values.shape[1])
    ]


def round_weights_twin(weights: list[float], scales: list[float]) -> list[float]:
    """Weights times their values' scales, rounded to 255 levels per 16 positions, and divided by the scales again."""
    rounded = []
    for start in range(0, len(weights), 16):
        tile = [w * s for w, s in zip(weights[start : start + 16], scales[start : start + 16], strict=True)]
        step_size = max(tile) / 255
        rounded += [round(w / step_size) * step_size if step_size else 0.0 for w in tile]
    return [w / s if s else 0.0 for w, s in zip(rounded, scales, strict=True)]


def round_to_rows(x: np.ndarray) -> np.ndarray:
    """8 bits with one scale along the last axis."""
    largest = np.abs(x).max(axis=-1, keepdims=True).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        levels = np.rint(x * np.nan_to_num(np.float32(127) / largest, posinf=0.0))
    rounded: np.ndarray = (levels * (largest / np.float32(127))).astype(np.float32)
    return rounded


@settings(max_examples=40, deadline=None)
@given(
    seed=SEEDS,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    half_dim=st.integers(1, 5),
    half_rotary=st.integers(1, 5),
    interleaved=st.booleans(),
    scale=st.sampled_from([1.0, 1.25]),
    dtype=st.sampled_from(["f32", "bf16", "int8"]),
    sequences=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=3),
)
def test_rope_cache_and_attention(
    *,
    seed: int,
    kv_heads: int,
    group: int,
    half_dim: int,
    half_rotary: int,
    interleaved: bool,
    scale: float,
    dtype: str,
    sequences: list[tuple[int, int]],
) -> None:
    rng = np.random.default_rng(seed)
    dim, heads, block_size = 2 * half_dim, kv_heads * group, 4
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5)
    frequencies = rng.uniform(0.01, 1.5, min(half_rotary, half_dim)).astype(np.float32)
    rope = RopeSpec(frequencies, scale, interleaved)
    cache = ReferenceCache(
        num_layers=2, num_blocks=16, block_size=block_size, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype
    )
    tables = rng.permutation(16)[: 4 * len(sequences)].reshape(len(sequences), 4)
    stored = {"f32": np.asarray, "bf16": round_to_bfloat16, "int8": round_to_rows}[dtype]
    met = round_to_rows if dtype == "int8" else np.asarray

    # Earlier positions are in the cache already, written here by hand, position by position.
    past = []
    for (start, _), table in zip(sequences, tables, strict=True):
        keys, values = (stored(normal(int(rng.integers(2**31)), start, kv_heads, dim)) for _ in range(2))
        for position in range(start):
            block = table[position // block_size]
            cache.keys[1, block, position % block_size] = keys[position]
            cache.values[1, block, position % block_size] = values[position]
        past.append((keys, values))

    starts, lengths = [s for s, _ in sequences], [n for _, n in sequences]
    ops = ReferenceOps(step(lengths, starts, tables), cache, ReferenceWeights(dequantize_f32))
    qkv = normal(seed, sum(lengths), (heads + 2 * kv_heads) * dim)
    q = ops.rope_and_cache(qkv, 1, spec, rope)
    out = ops.attention(q, 1, spec)

    row = 0
    for (start, length), (past_keys, past_values), table in zip(sequences, past, tables, strict=True):
        keys, values = past_keys, past_values
        for position in range(start, start + length):
            split = qkv[row].reshape(-1, dim)
            queries = [rotated_twin(head, position, rope) for head in split[:heads]]
            new_keys = [rotated_twin(head, position, rope) for head in split[heads : heads + kv_heads]]
            np.testing.assert_allclose(q[row].reshape(heads, dim), queries, rtol=1e-5, atol=1e-6)
            # The twin's last bit may round to a neighbouring stored value: what is stored is close, and taken as it is.
            new_key = cache.keys[1, table[position // block_size], position % block_size]
            step_size = {"f32": 1e-6, "bf16": 2.0**-8, "int8": 1 / 127}[dtype] * np.abs(new_keys).max(axis=1)
            assert (np.abs(new_key - new_keys) <= step_size[:, None] + 1e-6).all()
            keys = np.concatenate((keys, new_key[None]))
            values = np.concatenate((values, stored(split[heads + kv_heads :])[None]))
            for head in range(heads):
                kv = head // group
                query = q[row].reshape(heads, dim)[head]
                eight_bits = dtype == "int8"
                expected = attention_twin(
                    met(query[None])[0], keys[:, kv], values[:, kv], spec.scale, eight_bits=eight_bits
                )
                # A weight on the border of two levels may fall to either side: a level is 1/255 of the largest.
                slack = np.abs(values[:, kv]).max() / 255 if eight_bits else 0.0
                np.testing.assert_allclose(
                    out[row].reshape(heads, dim)[head], expected, rtol=1e-5, atol=1e-5 + 0.6 * slack
                )
            row += 1
    assert np.isnan(cache.keys[0]).all(), "another layer's cache was touched"
    written = sum(starts) + sum(lengths)
    assert np.isfinite(cache.values[1]).sum() == written * kv_heads * dim, "a slot outside the rows was touched"


def test_attention_over_a_bfloat16_cache_rounds_only_what_is_stored() -> None:
    length, dim = 21, 6
    keys, values, query = normal(3, length, 1, dim), normal(4, length, 1, dim), normal(5, 1, 2 * dim)
    cache = ReferenceCache(num_layers=1, num_blocks=2, block_size=16, num_kv_heads=1, head_dim=dim, dtype="bf16")
    table = np.array([[1, 0]], dtype=np.int32)
    cache.write(0, table[0], np.arange(length, dtype=np.int32), keys, values)
    ops = ReferenceOps(step([1], [length - 1], table), cache, ReferenceWeights(dequantize_f32))
    got = ops.attention(query, 0, AttentionSpec(2, 1, dim, 0.4)).reshape(2, dim)

    stored_keys, stored_values = round_to_bfloat16(keys[:, 0]), round_to_bfloat16(values[:, 0])
    for head in range(2):
        seen = query.reshape(2, dim)[head]
        scores = [math.fsum(float(a) * float(b) for a, b in zip(seen, key, strict=True)) * 0.4 for key in stored_keys]
        weights = np.exp(np.array(scores) - max(scores))
        np.testing.assert_allclose(got[head], weights @ stored_values / weights.sum(), rtol=1e-5)


def test_the_cache_in_bfloat16_holds_rounded_values() -> None:
    keys, values = normal(0, 3, 2, 4), normal(1, 3, 2, 4)
    cache = ReferenceCache(num_layers=1, num_blocks=2, block_size=2, num_kv_heads=2, head_dim=4, dtype="bf16")
    table, positions = np.array([1, 0], dtype=np.int32), np.arange(3, dtype=np.int32)
    cache.write(0, table, positions, keys, values)
    got_keys, got_values = cache.read(0, table, 3)
    np.testing.assert_array_equal(got_keys, round_to_bfloat16(keys))
    np.testing.assert_array_equal(got_values, round_to_bfloat16(values))
    assert (got_keys != keys).any()


@settings(deadline=None)
@given(SEEDS, st.integers(1, 40), st.integers(1, 300), st.integers(1, 200))
def test_a_row_has_the_same_bits_in_every_place(seed: int, rows: int, width: int, features: int) -> None:
    """Whatever the machine's BLAS does at the edges of a product."""
    x, weights, tensor = (
        normal(seed, rows, width),
        ReferenceWeights(dequantize_f32),
        weight(normal(seed, features, width)),
    )
    whole = weights.product(x, tensor)
    np.testing.assert_allclose(whole, x.astype(np.float64) @ weights.matrix(tensor).T, rtol=1e-4, atol=1e-4)
    alone = np.concatenate([weights.product(x[row : row + 1], tensor) for row in range(rows)])
    np.testing.assert_array_equal(alone, whole)
    np.testing.assert_array_equal(weights.product(x[::-1], tensor)[::-1], whole)


def test_weights_are_expanded_once() -> None:
    calls = []

    def counting(type_name: str, data: np.ndarray) -> np.ndarray:
        calls.append(type_name)
        return dequantize_f32(type_name, data)

    weights = ReferenceWeights(counting)
    tensor = weight(np.ones((2, 3)))
    assert weights.matrix(tensor) is weights.matrix(tensor)
    assert calls == ["F32"]


def test_unknown_names_and_sizes_are_refused() -> None:
    with pytest.raises(KernelError, match="precision must be one of f32, bf16, int8, int4, native, got 'fp8'"):
        ReferenceWeights(dequantize_f32, "fp8")
    with pytest.raises(KernelError, match="type must be one of f32, bf16, int8, got 'int4'"):
        ReferenceCache(num_layers=1, num_blocks=1, block_size=1, num_kv_heads=1, head_dim=1, dtype="int4")
    wrong = WeightTensor("short", "F32", (2, 4), np.zeros((2, 12), dtype=np.uint8))
    with pytest.raises(KernelError, match=r"short: shape \(2, 4\) wants 8 values"):
        ReferenceWeights(dequantize_f32).matrix(wrong)
