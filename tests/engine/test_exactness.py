"""Exact by construction: the same tokens and log-probability bits in every circumstance that ``verify`` knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.assembly import build_backend, resolve_config
from shoal.backends.base import Backend
from shoal.config import EngineConfig
from shoal.core.plan import EntryResult, StepPlan, StepResult
from shoal.kernels.native import available_isas
from shoal.models import GGUFFile, describe
from shoal.verification import Report, make_requests, verify

TINY = Path(__file__).parent.parent / "golden" / "data" / "tiny"


def run(path: Path, config: EngineConfig, count: int) -> Report:
    model = describe(GGUFFile.open(path))
    resolved, _ = resolve_config(model, config)
    description = model.description
    requests = make_requests(
        count, vocab_size=description.vocab_size, context_length=resolved.context_length or description.context_length
    )
    return verify(lambda variant: build_backend(model, variant), resolved, requests)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize(
    ("name", "precision", "kv_dtype"),
    [
        ("llama-gguf/tiny-llama.Q4_1.gguf", "f32", "f32"),
        ("llama-gguf/tiny-llama.Q4_1.gguf", "bf16", "bf16"),
        ("llama-gguf/tiny-llama.Q4_1.gguf", "int8", "int8"),
        ("llama-gguf/tiny-llama.Q4_1.gguf", "native", "bf16"),
        ("llama-k-gguf/tiny-llama-k.Q4_K_M.gguf", "int4", "int8"),
    ],
)
def test_tiny_models(name: str, precision: str, kv_dtype: str, isa: str) -> None:
    report = run(TINY / name, EngineConfig(precision=precision, kv_dtype=kv_dtype, isa=isa), 16)
    assert report.mismatches == 0
    assert report.ok, [item.name for item in report.variants if not item.exercised]


@pytest.mark.model
@pytest.mark.parametrize("precision", ["auto", "int8", pytest.param("bf16", marks=pytest.mark.slow)])
def test_the_default_model(model_path: Path, precision: str) -> None:
    report = run(model_path, EngineConfig(precision=precision), 64)
    assert report.requests == 64
    assert report.comparisons >= 64 * 8
    assert report.mismatches == 0
    assert report.ok, [item.name for item in report.variants if not item.exercised]


class Drifting:
    """A backend whose tokens depend on the batch: what verification is there to find."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def execute(self, plan: StepPlan) -> StepResult:
        result = self.inner.execute(plan)
        if len(plan.entries) < 3:
            return result
        changed = [
            other_token(item) if number == 2 and item.token_ids else item for number, item in enumerate(result.entries)
        ]
        return StepResult(tuple(changed))


def other_token(item: EntryResult) -> EntryResult:
    return item._replace(token_ids=(item.token_ids[0] ^ 1,))


def test_verification_finds_what_depends_on_the_batch() -> None:
    model = describe(GGUFFile.open(TINY / "llama-gguf/tiny-llama.Q4_1.gguf"))
    resolved, _ = resolve_config(model, EngineConfig())
    requests = make_requests(
        8, vocab_size=model.description.vocab_size, context_length=model.description.context_length
    )

    def make(variant: EngineConfig) -> Backend:
        return Drifting(build_backend(model, replace(variant, threads=1)))  # type: ignore[return-value]

    report = verify(make, resolved, requests)
    assert report.mismatches > 0
    assert not report.ok
