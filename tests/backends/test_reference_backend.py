"""The reference backend on a tiny quantized model: a completion is the same bits however it was scheduled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plans import entry, plan, request

from shoal.backends.base import Backend
from shoal.backends.reference import ReferenceBackend
from shoal.core.plan import EntryResult
from shoal.core.request import Request
from shoal.errors import ConfigError, EngineClosedError, KernelError
from shoal.models import GGUFFile, describe

MODEL = Path(__file__).parent.parent / "golden" / "data" / "tiny" / "llama-gguf" / "tiny-llama.Q4_1.gguf"
BLOCKS_EACH = 4


@pytest.fixture(scope="module")
def model() -> tuple[Any, Any]:
    return describe(GGUFFile.open(MODEL))


@pytest.fixture(params=["f32", "bf16", "native"])
def backend(request: pytest.FixtureRequest, model: tuple[Any, Any]) -> ReferenceBackend:
    return ReferenceBackend(*model, num_blocks=24, precision=request.param)


def prompts() -> list[tuple[int, ...]]:
    rng = np.random.default_rng(7)
    return [tuple(rng.integers(0, 512, length).tolist()) for length in (1, 5, 17, 33)]


def requests(**params: Any) -> list[Request]:
    common = {"logprobs": 3, "max_tokens": 10, **params}
    return [request(prompt, f"r{i}", seed=i, **common) for i, prompt in enumerate(prompts())]


def tables() -> list[tuple[int, ...]]:
    blocks = np.random.default_rng(3).permutation(24).tolist()
    return [tuple(blocks[i * BLOCKS_EACH : (i + 1) * BLOCKS_EACH]) for i in range(6)]


def run(backend: Backend, reqs: list[Request], count: int, chunk: int) -> list[list[EntryResult]]:
    """Run all requests side by side, prompts in chunks; each one's first ``count`` sampling results."""
    texts, computed = [req.prompt_ids for req in reqs], [0] * len(reqs)
    results: list[list[EntryResult]] = [[] for _ in reqs]
    while any(len(items) < count for items in results):
        live = [i for i in range(len(reqs)) if len(results[i]) < count]
        rows = [min(chunk, len(texts[i]) - computed[i]) for i in live]
        entries = [
            entry(reqs[i], texts[i], computed[i], size, tables()[i], seq_id=i)
            for i, size in zip(live, rows, strict=True)
        ]
        for i, size, item, result in zip(live, rows, entries, backend.execute(plan(*entries)).entries, strict=True):
            assert result.error is None
            assert len(result.token_ids) == item.samples
            computed[i] += size
            if item.samples:
                results[i].append(result)
                texts[i] += result.token_ids
    for i in range(len(reqs)):
        backend.forget(i)
    return results


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.9}, {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.5}]
)
def test_alone_is_together_is_chunked(backend: ReferenceBackend, params: dict[str, Any]) -> None:
    reqs = requests(**params)
    together = run(backend, reqs, 10, chunk=100)
    assert run(backend, reqs, 10, chunk=3) == together
    assert [run(backend, [req], 10, chunk=100)[0] for req in reqs] == together


def test_greedy_takes_the_best_of_the_logits(backend: ReferenceBackend) -> None:
    for req, results in zip(requests(), run(backend, requests(), 10, chunk=8), strict=True):
        tokens = [result.token_ids[0] for result in results]
        logits = backend.logits(req.prompt_ids + tuple(tokens))[len(req.prompt_ids) - 1 : -1]
        assert np.argmax(logits, axis=1).tolist() == tokens
        wide = logits.astype(np.float64)
        logprobs = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
        for row, result in zip(logprobs, results, strict=True):
            (told,) = result.logprobs
            best = np.argsort(-row)[:3]
            assert [token for token, _ in told.top] == best.tolist()
            np.testing.assert_allclose([value for _, value in told.top], row[best], atol=1e-4)
            assert told.logprob == told.top[0][1]


def test_long_evaluations_are_cut_without_a_trace(model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ReferenceBackend(*model, num_blocks=1)
    ids = prompts()[3]
    whole = backend.logits(ids)
    assert whole.shape == (33, 512)
    monkeypatch.setattr("shoal.backends.reference.EVALUATION_ROWS", 10)
    np.testing.assert_array_equal(backend.logits(ids), whole)
    assert backend.logits(()).shape == (0, 512)


def test_precisions_differ_but_little(model: tuple[Any, Any]) -> None:
    ids = prompts()[3]
    exact = ReferenceBackend(*model, num_blocks=1).logits(ids)
    for precision in ("bf16", "native"):
        other = ReferenceBackend(*model, num_blocks=1, precision=precision).logits(ids)
        assert 1e-4 < np.abs(other - exact).max() < 0.5


def test_a_step_may_run_again(backend: ReferenceBackend) -> None:
    req = requests()[2]
    step = plan(entry(req, req.prompt_ids, 0, 17, (3, 1)))
    first = backend.execute(step)
    assert backend.execute(step) == first


def test_a_step_without_samples(backend: ReferenceBackend) -> None:
    req = requests()[2]
    assert backend.execute(plan(entry(req, req.prompt_ids, 0, 9, (3, 1)))).entries == (EntryResult(),)


def test_properties(model: tuple[Any, Any]) -> None:
    backend: Backend = ReferenceBackend(*model, num_blocks=5, block_size=32, precision="native")
    shape = backend.cache_shape
    assert (shape.num_blocks, shape.block_size, shape.num_tokens) == (5, 32, 160)
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.dtype) == (2, 2, 16, "bf16")
    assert (backend.vocab_size, backend.context_length) == (512, 256)
    assert ReferenceBackend(*model, num_blocks=1).cache_shape.dtype == "f32"
    assert ReferenceBackend(*model, num_blocks=1, kv_dtype="bf16").cache_shape.dtype == "bf16"


def test_logits_that_are_no_numbers_fail_their_own_entry(backend: ReferenceBackend) -> None:
    good, bad = requests()[1:3]
    tokens = bad.prompt_ids
    # Positions [0, 16) of the second sequence were never computed, so its attention reads what was never written.
    step = plan(
        entry(good, good.prompt_ids, 0, 5, (0,), seq_id=0),
        entry(bad, tokens, 16, 1, (1, 2), seq_id=1),
    )
    first, second = backend.execute(step).entries
    assert first == backend.execute(plan(step.entries[0])).entries[0]
    assert first.error is None
    assert second.token_ids == ()
    assert second.error is not None
    assert "NaN" in second.error


def test_refusals(model: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="num_blocks"):
        ReferenceBackend(*model, num_blocks=0)
    with pytest.raises(KernelError, match="precision must be one of"):
        ReferenceBackend(*model, num_blocks=1, precision="int3")
    backend = ReferenceBackend(*model, num_blocks=2)
    req = request((512,))
    with pytest.raises(KernelError, match="got token 512"):
        backend.execute(plan(entry(req, (512,), 0, 1, (0,))))
    backend.close()
    backend.close()
    with pytest.raises(EngineClosedError):
        backend.execute(plan(entry(request((1,)), (1,), 0, 1, (0,))))
