"""Every native operation, on every instruction set this machine has, against the reference over odd shapes.

Three kinds of check: close to the reference (which sums in another order), equal to the bit between instruction sets,
and equal to the bit whatever else is in the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_harness import (
    FLOATS,
    QUANTIZED,
    Geometry,
    Native,
    Reference,
    chunk_step,
    float_weight,
    random_weight,
    rows_step,
)

from shoal.errors import KernelError
from shoal.kernels.native import available_isas, choose_isa
from shoal.kernels.ops import AttentionSpec, RopeSpec
from shoal.models.dequantize import dequantize

ISAS = available_isas()
ALL_ISAS = ("amx", "avx512", "avx2", "portable")
SEEDS = st.integers(0, 2**32 - 1)


def isa_parameters() -> list[Any]:
    """Every known set; those this machine lacks are skipped, with the reason."""
    missing = pytest.mark.skip(reason="this processor lacks the instruction set")
    return [pytest.param(isa, marks=() if isa in ISAS else missing) for isa in ALL_ISAS]


each_isa = pytest.mark.parametrize("isa", isa_parameters())


def through_identity(build: Callable[[Any, Any], Any], table: np.ndarray, width: int) -> Callable[[Any], Any]:
    """embed -> build -> sampled rows -> identity."""
    identity = float_weight(np.eye(width, dtype=np.float32), "identity")

    def model(ops: Any) -> Any:
        return ops.lm_head(ops.sample_rows(build(ops, ops.embed(float_weight(table, "table")))), identity)

    return model


def close(got: np.ndarray, wanted: np.ndarray, relative: float) -> None:
    scale = float(np.abs(wanted).max()) or 1.0
    assert np.isfinite(got).all()
    assert float(np.abs(got - wanted).max()) <= relative * scale


@each_isa
@pytest.mark.parametrize("type_name", [*FLOATS, *QUANTIZED])
@pytest.mark.parametrize("precision", ["f32", "bf16", "int8", "int4", "native"])
def test_linear_is_close_to_the_reference(isa: str, type_name: str, precision: str) -> None:
    rng = np.random.default_rng(7)
    features = 512 if type_name.endswith("_K") else 96
    if type_name in FLOATS:
        features = 37  # odd, no multiple of anything
    for columns, rows in ((1, 1), (16, 2), (33, 5), (50, 13), (67, 32)):
        head = random_weight(rng, type_name, columns, features)
        table = rng.standard_normal((columns, features)).astype(np.float32)

        def model(ops: Any, table: np.ndarray = table, head: Any = head) -> Any:
            return ops.lm_head(ops.sample_rows(ops.embed(float_weight(table))), head)

        shape = Geometry(vocab=columns)
        inputs = rows_step(rng.integers(0, columns, rows).tolist())
        got = Native(model, shape, isa=isa, precision=precision).run(inputs)
        wanted = Reference(model, shape, precision=precision).run(inputs)
        # Q6_K is rounded once more to 8 bits per 32, unless all matrices are rounded alike.
        close(got, wanted, 1e-2 if type_name == "Q6_K" and precision in ("native", "int4") else 3e-5)


@pytest.mark.parametrize("type_name", [*FLOATS, *QUANTIZED])
@pytest.mark.parametrize("precision", ["f32", "bf16", "int8", "int4", "native"])
def test_linear_is_the_same_on_every_instruction_set_alone_and_together(type_name: str, precision: str) -> None:
    rng = np.random.default_rng(11)
    features = 256 if type_name in QUANTIZED else 96 if type_name == "BF16" else 40
    head = random_weight(rng, type_name, 53, features)
    table = rng.standard_normal((53, features)).astype(np.float32)

    def model(ops: Any) -> Any:
        return ops.lm_head(ops.sample_rows(ops.embed(float_weight(table))), head)

    shape = Geometry(vocab=53)
    # More than one tile of rows, with a long and with a short rest.
    counts = (29, 35, 49)
    steps = [rng.integers(0, 53, count).tolist() for count in counts]
    # The tile unit adds up bfloat16 products in an order of its own.
    in_bfloat16 = precision == "bf16" or (precision, type_name) == ("native", "BF16")
    expected: dict[tuple[bool, int], np.ndarray] = {}
    for isa in ISAS:
        for threads in (1, 2):
            native = Native(model, shape, isa=isa, precision=precision, threads=threads)
            for index, tokens in enumerate(steps):
                together = native.run(rows_step(tokens))
                alone = np.concatenate([native.run(rows_step([token])) for token in tokens])
                np.testing.assert_array_equal(together, alone)
                own_order = isa == "amx" and in_bfloat16 and features % 32 == 0
                np.testing.assert_array_equal(together, expected.setdefault((own_order, index), together))


@each_isa
@pytest.mark.parametrize("type_name", ["Q4_1", "Q4_0"])
def test_four_bits_made_from_floats_are_the_ones_they_came_from(isa: str, type_name: str) -> None:
    rng = np.random.default_rng(13)
    table, head = rng.standard_normal((40, 64)).astype(np.float32), random_weight(rng, "Q8_0", 40, 96)
    packed = random_weight(rng, type_name, 96, 64)
    blocks = packed.data.reshape(96, 2, -1)
    # Scales above zero and a group that uses all sixteen levels, so that its least and greatest value give it away.
    blocks[:, :, 1] &= 0x7F
    blocks[:, :, -16:-8] = np.arange(0x0F, 0x8F, 0x10, dtype=np.uint8) | np.arange(8, dtype=np.uint8)
    blocks[:, :, -16] = 0xF0
    blocks[:, :, -15] = 0x0F
    floats = float_weight(dequantize(type_name, packed.data), "floats")

    def through(body: Any) -> Callable[[Any], Any]:
        return lambda ops: ops.lm_head(ops.sample_rows(ops.linear(ops.embed(float_weight(table)), (body,))), head)

    shape, inputs = Geometry(vocab=40), rows_step(list(range(40)))
    kept = Native(through(packed), shape, isa=isa, precision="int4").run(inputs)
    if type_name == "Q4_1":
        made = Native(through(floats), shape, isa=isa, precision="int4").run(inputs)
        np.testing.assert_array_equal(made, kept)
    close(kept, Reference(through(floats), shape, precision="int4").run(inputs), 2e-2)


@each_isa
@pytest.mark.parametrize("features", [1, 31, 64, 65, 200])
def test_eight_bits_of_any_width(isa: str, features: int) -> None:
    rng = np.random.default_rng(features)
    head = float_weight(rng.standard_normal((33, features)).astype(np.float32))
    table = rng.standard_normal((33, features)).astype(np.float32)

    def model(ops: Any) -> Any:
        return ops.lm_head(ops.sample_rows(ops.embed(float_weight(table))), head)

    inputs = rows_step(rng.integers(0, 33, 40).tolist())
    shape = Geometry(vocab=33)
    got = Native(model, shape, isa=isa, precision="int8", threads=2).run(inputs)
    close(got, Reference(model, shape, precision="int8").run(inputs), 3e-5)


@each_isa
@pytest.mark.parametrize("type_name", [*FLOATS, *QUANTIZED])
def test_embedding_equals_dequantization(isa: str, type_name: str) -> None:
    rng = np.random.default_rng(3)
    features = 256
    table = random_weight(rng, type_name, features, features)
    identity = float_weight(np.eye(features, dtype=np.float32))
    native = Native(
        lambda ops: ops.lm_head(ops.sample_rows(ops.embed(table)), identity), Geometry(vocab=features), isa=isa
    )
    tokens = [0, 255, 17, 3]
    np.testing.assert_array_equal(native.run(rows_step(tokens)), dequantize(type_name, table.data[tokens]))


@each_isa
@pytest.mark.parametrize("width", [1, 15, 16, 19, 64, 576])
def test_rms_norm(isa: str, width: int) -> None:
    rng = np.random.default_rng(width)
    table = rng.standard_normal((width, width)).astype(np.float32) * 3
    weight = float_weight(rng.standard_normal(width).astype(np.float32))
    model = through_identity(lambda ops, x: ops.rms_norm(x, weight, 1e-5), table, width)
    inputs = rows_step(list(range(min(width, 21))))
    shape = Geometry(vocab=width)
    close(Native(model, shape, isa=isa).run(inputs), Reference(model, shape).run(inputs), 1e-6)


@each_isa
@pytest.mark.parametrize("width", [2, 30, 32, 38, 192])
def test_silu_mul(isa: str, width: int) -> None:
    rng = np.random.default_rng(width)
    table = (rng.standard_normal((width, width)) * 20).astype(np.float32)
    half = width // 2
    padding = float_weight(np.eye(width, half, dtype=np.float32))  # back to `width` columns

    def build(ops: Any, x: Any) -> Any:
        return ops.linear(ops.silu_mul(x), (padding,))

    model = through_identity(build, table, width)
    inputs = rows_step(list(range(min(width, 17))))
    shape = Geometry(vocab=width)
    close(Native(model, shape, isa=isa).run(inputs), Reference(model, shape).run(inputs), 1e-6)


@each_isa
def test_silu_of_extremes(isa: str) -> None:
    gates = np.array([0.0, -0.0, 1e-30, 87.0, 89.0, 1e4, 3e38, -87.0, -88.5, -1e4, -3e38, -104.0], np.float32)
    width = 2 * len(gates)
    table = np.tile(np.concatenate((gates, np.ones(len(gates), np.float32))), (width, 1))
    padding = float_weight(np.eye(width, len(gates), dtype=np.float32))
    model = through_identity(lambda ops, x: ops.linear(ops.silu_mul(x), (padding,)), table, width)
    got = Native(model, Geometry(vocab=width), isa=isa).run(rows_step([0]))[0, : len(gates)]
    with np.errstate(over="ignore"):
        wanted = gates.astype(np.float64) / (1 + np.exp(-gates.astype(np.float64)))
    assert np.abs(got - wanted).max() <= 1e-6 * 3e38
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-34)


@each_isa
@pytest.mark.parametrize("fused", [True, False])
def test_add(isa: str, fused: bool) -> None:
    rng = np.random.default_rng(5)
    width = 50
    table = rng.standard_normal((width, width)).astype(np.float32)
    weight = float_weight(rng.standard_normal((width, width)).astype(np.float32))
    bias = float_weight(rng.standard_normal(width).astype(np.float32))

    def build(ops: Any, x: Any) -> Any:
        product = ops.linear(x, (weight,), (bias,))
        # A product used twice cannot be folded into its addition.
        return ops.add(x, product) if fused else ops.add(product, ops.rms_norm(product, bias, 1e-5))

    model = through_identity(build, table, width)
    inputs = rows_step(list(range(width)))
    shape = Geometry(vocab=width)
    close(Native(model, shape, isa=isa).run(inputs), Reference(model, shape).run(inputs), 1e-5)


def attention_model(
    rng: np.random.Generator, shape: Geometry, interleaved: bool, rotary_dim: int
) -> Callable[[Any], Any]:
    width = shape.num_heads * shape.head_dim
    wide = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    table = rng.standard_normal((shape.vocab, 24)).astype(np.float32)
    weights = tuple(
        float_weight((rng.standard_normal((rows, 24)) * 0.5).astype(np.float32))
        for rows in (width, (wide - width) // 2, (wide - width) // 2)
    )
    head = float_weight(rng.standard_normal((shape.vocab, width)).astype(np.float32))
    spec = AttentionSpec(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim**-0.5)
    frequencies = (10000.0 ** (-np.arange(rotary_dim // 2) / (rotary_dim // 2))).astype(np.float32)
    rope = RopeSpec(frequencies, 1.0, interleaved)

    def model(ops: Any) -> Any:
        x = ops.linear(ops.embed(float_weight(table)), weights)
        for layer in range(shape.num_layers):
            attended = ops.attention(ops.rope_and_cache(x, layer, spec, rope), layer, spec)
            if layer + 1 < shape.num_layers:
                x = ops.linear(attended, tuple(float_weight(np.ones((w.shape[0], width), np.float32)) for w in weights))
        return ops.lm_head(ops.sample_rows(attended), head)

    return model


ATTENTION_SHAPES = [
    # heads, kv heads, head dim, rotary dim
    (1, 1, 16, 16),
    (4, 2, 16, 16),
    (9, 3, 64, 64),
    (6, 2, 32, 16),
    (4, 1, 40, 24),
    (16, 1, 32, 32),
    (26, 2, 80, 80),
]


@each_isa
@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("sizes", ATTENTION_SHAPES)
def test_attention(isa: str, kv_dtype: str, sizes: tuple[int, int, int, int]) -> None:
    heads, kv_heads, head_dim, rotary_dim = sizes
    rng = np.random.default_rng(sum(sizes))
    shape = Geometry(
        vocab=30,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_blocks=16,
        block_size=32 if head_dim == 32 else 16,
        kv_dtype=kv_dtype,
        max_context=256,
    )
    model = attention_model(rng, shape, head_dim % 32 == 0, rotary_dim)
    native, reference = Native(model, shape, isa=isa, threads=2), Reference(model, shape)
    tables = rng.permutation(16).tolist()
    first, second = tables[:8], tables[8:]
    # Two sequences in chunks of odd sizes: their first rows, one decode beside a chunk, decodes over a tile's end.
    for chunks in (((0, 21), (0, 1)), ((21, 1), (1, 40)), ((22, 10), (41, 1)), ((32, 1), (42, 7)), ((33, 30), (49, 1))):
        inputs = chunk_step(
            [
                (start, rng.integers(0, 30, count).tolist(), table)
                for (start, count), table in zip(chunks, (first, second), strict=True)
            ]
        )
        got, wanted = native.run(inputs), reference.run(inputs)
        # A difference in the last bit of a float32 may round a stored key or value the other way.
        close(got, wanted, {"f32": 1e-5, "bf16": 4e-3, "int8": 2e-2}[kv_dtype])


@settings(max_examples=12, deadline=None)
@given(SEEDS, st.sampled_from(["f32", "bf16", "int8"]), st.integers(1, 60))
def test_attention_is_exact_in_chunks_batches_threads_and_sets(seed: int, kv_dtype: str, length: int) -> None:
    rng = np.random.default_rng(seed)
    shape = Geometry(vocab=20, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=24, num_blocks=12, kv_dtype=kv_dtype)
    model = attention_model(rng, shape, True, 24)
    tokens = rng.integers(0, 20, length).tolist()
    other = rng.integers(0, 20, 30).tolist()
    whole_table, table = [0, 1, 2, 3], [9, 4, 7, 5]
    whole = None
    for isa in ISAS:
        native = Native(model, shape, isa=isa)
        result = native.run(chunk_step([(0, tokens, whole_table)]))
        whole = result if whole is None else whole
        np.testing.assert_array_equal(result, whole)
    native = Native(model, shape, isa=ISAS[0], threads=2)
    pieces = []
    start, beside = 0, 0
    while start < length:
        count = int(rng.integers(1, 1 + length - start))
        chunks = [(start, tokens[start : start + count], table)]
        if beside < len(other):
            chunks.insert(int(rng.integers(0, 2)), (beside, other[beside : beside + 3], [8, 10]))
        result = native.run(chunk_step(chunks))
        pieces.append(result[:count] if chunks[0][2] is table else result[-count:])
        start, beside = start + count, beside + 3
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


def test_more_threads_than_cores_over_many_steps() -> None:
    """Threads lose their cores in the middle of phases and come back steps later; nothing is done twice or left out."""
    rng = np.random.default_rng(9)
    shape = Geometry(vocab=20, num_layers=4, num_heads=6, num_kv_heads=2, head_dim=32, num_blocks=12)
    model = attention_model(rng, shape, True, 32)
    steps = [chunk_step([(0, rng.integers(0, 20, count).tolist(), [3, 1])]) for count in (1, 2, 5, 17)]
    alone = Native(model, shape, isa=ISAS[0])
    expected = [alone.run(step) for step in steps]
    crowd = Native(model, shape, isa=ISAS[0], threads=7)
    for number in range(600):
        np.testing.assert_array_equal(crowd.run(steps[number % 4]), expected[number % 4])


@each_isa
@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "int8"])
def test_a_block_that_held_nan_gives_nothing_away(isa: str, kv_dtype: str) -> None:
    """Whoever gets the blocks of a sequence whose values were NaN computes as if they were new."""
    rng = np.random.default_rng(1)
    shape = Geometry(vocab=20, num_heads=4, num_kv_heads=2, head_dim=16, num_blocks=4, kv_dtype=kv_dtype)
    width = 64
    table = rng.standard_normal((20, 128)).astype(np.float32)
    table[19] = np.nan
    head = float_weight(rng.standard_normal((20, width)).astype(np.float32))
    spec = AttentionSpec(4, 2, 16, 0.25)
    rope = RopeSpec(np.array([1.0, 0.1], np.float32), 1.0, True)

    def model(ops: Any) -> Any:
        q = ops.rope_and_cache(ops.embed(float_weight(table)), 0, spec, rope)
        return ops.lm_head(ops.sample_rows(ops.attention(q, 0, spec)), head)

    native = Native(model, shape, isa=isa)
    tokens = rng.integers(0, 19, 19).tolist()
    clean = native.run(chunk_step([(0, tokens, [2, 3])]))
    poisoned = native.run(chunk_step([(0, [19] * 32, [0, 1])]))
    assert np.isnan(poisoned).all()
    for sizes in ([19], [3, 1, 12, 1, 2], [1] * 19):
        native.run(chunk_step([(0, [19] * 32, [0, 1])]))
        start, pieces = 0, []
        for size in sizes:
            pieces.append(native.run(chunk_step([(start, tokens[start : start + size], [0, 1])])))
            start += size
        np.testing.assert_array_equal(np.concatenate(pieces), clean)


@each_isa
def test_a_nan_row_stays_alone(isa: str) -> None:
    rng = np.random.default_rng(2)
    table = rng.standard_normal((64, 64)).astype(np.float32)
    table[5] = np.nan
    table[6, 3] = np.inf
    head = random_weight(rng, "Q4_1", 64, 64)
    norm = float_weight(np.ones(64, np.float32))

    def model(ops: Any) -> Any:
        return ops.lm_head(ops.rms_norm(ops.sample_rows(ops.embed(float_weight(table))), norm, 1e-5), head)

    native = Native(model, Geometry(vocab=64), isa=isa)
    mixed = native.run(rows_step([1, 5, 2, 6, 3]))
    clean = native.run(rows_step([1, 2, 3]))
    np.testing.assert_array_equal(mixed[[0, 2, 4]], clean)
    assert np.isnan(mixed[[1, 3]]).all()


def test_a_step_that_does_not_fit_is_refused_by_name() -> None:
    table = float_weight(np.ones((8, 8), np.float32))
    spec = AttentionSpec(1, 1, 16, 0.25)
    rope = RopeSpec(np.ones(2, np.float32), 1.0, True)
    wide = float_weight(np.ones((48, 8), np.float32))
    head = float_weight(np.ones((8, 16), np.float32))

    def model(ops: Any) -> Any:
        q = ops.rope_and_cache(ops.linear(ops.embed(table), (wide,)), 0, spec, rope)
        return ops.lm_head(ops.sample_rows(ops.attention(q, 0, spec)), head)

    native = Native(model, Geometry(vocab=8, max_context=32, max_rows=20, num_blocks=3), isa=ISAS[0])
    good = (0, [1, 2], [0])
    assert np.isfinite(native.run(chunk_step([good]))).all()
    for chunk, message in (
        ((0, [8], [0]), "out of the vocabulary"),
        ((0, [-1], [0]), "out of the vocabulary"),
        ((32, [1], [0, 1, 2]), "out of the context"),
        ((-1, [1], [0]), "out of the context"),
        ((16, [1], [0]), "block table is too short"),
        ((0, [1], [3]), "out of the cache"),
        ((16, [1], [0, -1]), "out of the cache"),
        ((0, [1] * 21, [0, 1]), "too many rows"),
    ):
        with pytest.raises(KernelError, match=message):
            native.run(chunk_step([good, chunk]) if len(chunk[1]) < 21 else chunk_step([chunk]))
    assert np.isfinite(native.run(chunk_step([good]))).all()


def test_an_instruction_set_can_be_forced_and_a_missing_one_is_refused() -> None:
    assert choose_isa("auto") == ISAS[0]
    assert choose_isa("portable") == "portable"
    with pytest.raises(KernelError, match="it can run"):
        choose_isa("avx1024")
