"""Builds the native sampler for one instruction set and calls it on a ``SamplingBatch``."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.sampling.batch import SamplingBatch
from shoal.sampling.results import SampledRows

ROOT = Path(__file__).resolve().parents[2]
FLAGS = {
    "portable": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"),
}
NEEDS = {"portable": set(), "avx2": {"avx2", "fma"}, "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"}}


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which("g++") or shutil.which("c++")


def why_not(isa: str) -> str | None:
    """Why this machine cannot run that instruction set, or None if it can."""
    if not NEEDS[isa]:
        return None
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"{isa} needs an x86-64 processor"
    words = set(Path("/proc/cpuinfo").read_text().split()) if Path("/proc/cpuinfo").exists() else set()
    missing = NEEDS[isa] - words
    return f"this processor lacks {', '.join(sorted(missing))}" if missing else None


class NativeSampler:
    """The sampler of one instruction set, compiled into ``folder``."""

    def __init__(self, isa: str, folder: Path) -> None:
        library = folder / f"sampler_{isa}.so"
        gpp = compiler()
        assert gpp is not None
        command = [gpp, "-std=c++20", "-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
        command += [*FLAGS[isa], f"-DSHOAL_ISA=isa_{isa}", f"-I{ROOT / 'csrc'}"]
        command += [str(Path(__file__).parent / "sampler_shim.cpp"), "-o", str(library)]
        subprocess.run(command, check=True)
        self._library = ctypes.CDLL(str(library))
        self._library.shim_uniform.restype = ctypes.c_double
        self._library.shim_uniform.argtypes = [ctypes.c_uint64, ctypes.c_int64, ctypes.c_uint32]
        self._library.shim_log.restype = ctypes.c_double
        self._library.shim_log.argtypes = [ctypes.c_double]

    def __call__(self, logits: NDArray[np.float32], batch: SamplingBatch) -> SampledRows:
        """Sample each row of logits [rows, vocab]."""
        rows, vocab = logits.shape
        assert logits.dtype == np.float32
        assert logits.flags.c_contiguous
        assert rows == len(batch.rows)
        sampled = SampledRows.empty(batch)
        self._library.shim_sample_rows(
            _pointer(logits),
            rows,
            vocab,
            _pointer(batch.rows),
            _pointer(batch.bias_ids),
            _pointer(batch.bias_values),
            _pointer(batch.banned_ids),
            _pointer(batch.history),
            _pointer(batch.masks),
            ctypes.c_int64(batch.masks.shape[1]),
            _pointer(sampled.results),
            _pointer(sampled.top_ids),
            _pointer(sampled.top_logprobs),
            batch.max_logprobs,
        )
        return sampled

    def uniform(self, seed: int, position: int, draw: int) -> float:
        return float(self._library.shim_uniform(seed, position, draw))

    def log(self, x: float) -> float:
        return float(self._library.shim_log(x))

    def exp(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        y = np.empty_like(x)
        self._library.shim_exp(_pointer(x), len(x), _pointer(y))
        return y

    def layout(self, name: str, fields: int) -> list[int]:
        """Offsets of a struct's fields in order, then its size; ``name`` is params or result."""
        offsets = np.zeros(fields + 1, np.int64)
        getattr(self._library, f"shim_{name}_layout")(_pointer(offsets))
        return [int(offset) for offset in offsets]


def _pointer(array: NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
