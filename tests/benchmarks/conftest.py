"""The benchmarks are programs, not a package: their folders have to be on the path."""

from __future__ import annotations

import sys
from pathlib import Path

_BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path += [str(_BENCHMARKS / "peers"), str(_BENCHMARKS)]
