"""The probes measure something, say what they cannot, and never depend on how fast the machine is today."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from shoal.config import ISAS, KV_DTYPES
from shoal.errors import KernelError
from shoal.kernels.native import _native, available_isas
from shoal.perf import ceilings
from shoal.perf.ceilings import Ceilings, Rate, ScaledRate, available_paths, last_level_cache, measure_ceilings
from shoal.perf.paths import attention_path, matmul_path

MIB = 1 << 20


@pytest.mark.parametrize("path", available_paths())
def test_every_path_gives_positive_finite_rates(path: str) -> None:
    error, rates = _native.probe_compute(path, 2, 0.002, 3)
    assert error == ""
    assert len(rates) == 3
    assert all(math.isfinite(rate) and rate > 0 for rate in rates)


def test_all_threads_reach_at_least_half_of_one() -> None:
    found = measure_ceilings(2, paths=["fp32_portable"], sets=[16 * MIB], most_bytes=64 * MIB, seconds=0.02)
    for scaled in (*found.peaks.values(), *found.reads.values()):
        assert 0 < scaled.one.worst <= scaled.one.best < math.inf
        assert scaled.all.best >= 0.5 * scaled.one.best


def test_sets_are_bounded_whole_and_include_the_streamed_one() -> None:
    found = measure_ceilings(3, paths=[], sets=[1, 10 * MIB], most_bytes=32 * MIB, seconds=0.002, repetitions=1)
    assert found.stream_bytes == 30 * MIB
    assert list(found.reads) == [30 * MIB, 3 * MIB, 9 * MIB]
    assert found.bandwidth == max(item.all.best for item in found.reads.values())
    assert found.memory_bandwidth == found.reads[30 * MIB].all.best


def test_paths_that_are_not_there_are_named() -> None:
    with pytest.raises(KernelError, match="no path fp64_sparc"):
        measure_ceilings(1, paths=["fp64_sparc"], most_bytes=MIB)
    found = measure_ceilings(1, paths=["fp32_portable"], most_bytes=MIB, seconds=0.001, repetitions=1)
    with pytest.raises(KernelError, match="'int8_amx' was not measured; measured were fp32_portable"):
        found.peak("int8_amx")
    for path in {"int8_amx", "int8_vnni", "int8_avx2"} - set(available_paths()):
        error, rates = _native.probe_compute(path, 1, 0.001, 1)
        assert path in error
        assert rates == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [((0, 0.1, 1), "threads"), ((1, 0.0, 1), "seconds"), ((1, math.nan, 1), "seconds"), ((1, 0.1, 0), "repetitions")],
)
def test_probes_refuse_nonsense(arguments: tuple[int, float, int], word: str) -> None:
    for error, rates in (_native.probe_compute("fp32_portable", *arguments), _native.probe_read(MIB, *arguments)):
        assert word in error
        assert rates == []


def test_reading_needs_a_chunk_for_each_thread() -> None:
    assert "1 MiB a thread" in _native.probe_read(MIB, 2, 0.1, 1)[0]
    assert "at most 64 GiB" in _native.probe_read(2**40, 2, 0.1, 1)[0]


def test_what_the_kernels_use_can_be_measured_here() -> None:
    from shoal.kernels.native.formats import Format

    for isa in available_isas():
        used = {attention_path(isa, kind) for kind in KV_DTYPES}
        assert {*used, *(matmul_path(isa, kind) for kind in Format)} <= set(available_paths())


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "auto"])
def test_every_instruction_set_has_its_paths(isa: str) -> None:
    from shoal.kernels.native.formats import Format

    assert matmul_path(isa, Format.Q4H).startswith("int8")
    assert matmul_path(isa, Format.F32) == attention_path(isa, "bf16") == attention_path(isa, "f32")
    assert attention_path(isa, "int8").startswith("int8")


def _scaled(value: float) -> ScaledRate:
    return ScaledRate(Rate(value, value / 2), Rate(2 * value, value))


def test_the_higher_of_two_measurements_counts_and_movement_shows() -> None:
    first = Ceilings(threads=2, stream_bytes=8, reads={8: _scaled(10.0)}, peaks={"a": _scaled(5.0), "b": _scaled(1.0)})
    last = Ceilings(threads=2, stream_bytes=8, reads={8: _scaled(8.0)}, peaks={"a": _scaled(6.0)})
    both = first.raised_to(last)
    assert both.bandwidth == 20.0
    assert both.reads[8].all.worst == 8.0
    assert (both.peak("a"), both.peak("b")) == (12.0, 2.0)
    moved = last.change_from(first)
    assert moved == {"read 0 MiB": pytest.approx(-0.2), "a": pytest.approx(0.2)}
    record = both.as_record()
    assert record["bandwidth_bytes_per_s"] == 20.0
    assert record["peaks_ops_per_s"]["a"]["all_threads"] == {"best": 12.0, "worst": 5.0}
    assert record["reads"][0]["set_bytes"] == 8


def test_the_cache_is_read_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, size in enumerate(("48K", "2048K", "300M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert last_level_cache(tmp_path) == 300 * MIB
    assert last_level_cache(tmp_path / "nowhere") is None
    (tmp_path / "index0" / "size").write_text("many")
    assert last_level_cache(tmp_path) is None
    monkeypatch.setattr(ceilings, "last_level_cache", lambda: 10**12)
    assert ceilings._stream_bytes() == ceilings.MOST_STREAM
    monkeypatch.setattr(ceilings, "last_level_cache", lambda: None)
    assert ceilings._stream_bytes() == ceilings.LEAST_STREAM
