"""The null backend: texts that do not depend on how they were scheduled, and plans that it must refuse."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import entry, plan, request

from shoal.backends.base import Backend
from shoal.backends.null import Fault, NullBackend, ScriptedFaultError
from shoal.core.plan import CacheShape, EntryResult, StepEntry, StepPlan
from shoal.core.request import Request
from shoal.errors import EngineClosedError, KernelError

SHAPE = CacheShape(num_blocks=32, block_size=4, num_layers=1, num_kv_heads=1, head_dim=2, dtype="f32")
VOCAB = 50
PROMPT = (3, 1, 4, 1, 5, 9)


def null(**options: object) -> NullBackend:
    return NullBackend(SHAPE, VOCAB, 64, **options)  # type: ignore[arg-type]


def generate(
    backend: NullBackend,
    req: Request,
    count: int,
    *,
    chunks: tuple[int, ...] = (),
    restart_at: int | None = None,
    first_block: int = 0,
    seq_id: int = 0,
    index: int = 0,
) -> tuple[int, ...]:
    """Run one sequence by hand: prompt in chunks, then token by token; at length ``restart_at`` compute all again."""
    tokens, computed, pending = req.prompt_ids, 0, list(chunks)
    table = tuple(range(first_block, first_block + 8))
    while len(tokens) < len(req.prompt_ids) + count:
        if len(tokens) == restart_at:
            restart_at, computed = None, 0
            table = tuple(block + 8 for block in table)
        rows = min(pending.pop(0), len(tokens) - computed) if pending else len(tokens) - computed
        step = plan(entry(req, tokens, computed, rows, table, seq_id=seq_id, index=index))
        (result,) = backend.execute(step).entries
        assert result.error is None
        computed += rows
        tokens += result.token_ids
    return tokens[len(req.prompt_ids) :]


def test_is_a_backend() -> None:
    backend: Backend = null()
    assert backend.cache_shape == SHAPE
    assert (backend.vocab_size, backend.context_length) == (VOCAB, 64)


@given(st.lists(st.integers(1, 4), max_size=5), st.integers(7, 12), st.integers(0, 3))
def test_text_does_not_depend_on_chunks_or_recomputation(chunks: list[int], restart: int, seed: int) -> None:
    req = request(PROMPT)
    whole = generate(null(seed=seed), req, 8)
    assert all(0 <= token < VOCAB for token in whole)
    assert generate(null(seed=seed), req, 8, chunks=tuple(chunks), restart_at=restart) == whole


def test_text_is_the_same_in_a_batch() -> None:
    requests = [request(PROMPT[:length], f"r{length}") for length in (1, 4, 6)]
    alone = [generate(null(), req, 5) for req in requests]
    backend, tokens, computed = null(), [req.prompt_ids for req in requests], [0, 0, 0]
    for _ in range(5):
        entries = [
            entry(req, tokens[i], computed[i], len(tokens[i]) - computed[i], tuple(range(8 * i, 8 * i + 8)), seq_id=i)
            for i, req in enumerate(requests)
        ]
        computed = [len(item) for item in tokens]
        results = backend.execute(plan(*entries)).entries
        tokens = [old + new.token_ids for old, new in zip(tokens, results, strict=True)]
    assert [item[len(req.prompt_ids) :] for item, req in zip(tokens, requests, strict=True)] == alone


def test_seeds_and_completions_differ_unless_greedy() -> None:
    def text(backend_seed: int = 0, index: int = 0, **params: object) -> tuple[int, ...]:
        return generate(null(seed=backend_seed), request(PROMPT, **params), 8, index=index)

    assert text(1) != text(2)
    assert text(seed=1) == text(seed=2)
    assert text(index=1) == text(index=0)
    assert text(temperature=1.0, seed=1) == text(temperature=1.0, seed=1)
    assert text(temperature=1.0, seed=1) != text(temperature=1.0, seed=2)
    assert text(temperature=1.0, index=1) != text(temperature=1.0, index=0)


def test_a_step_may_run_again() -> None:
    backend, req = null(), request(PROMPT)
    step = plan(entry(req, PROMPT, 0, 6, (0, 1)))
    first = backend.execute(step)
    assert backend.execute(step) == first
    tokens = PROMPT + first.entries[0].token_ids
    second = plan(entry(req, tokens, 6, 1, (0, 1)))
    assert backend.execute(second) == backend.execute(second)


def test_min_tokens_and_avoid_are_kept() -> None:
    stop = frozenset(range(VOCAB)) - {7}
    backend = null()
    assert generate(backend, request(PROMPT, min_tokens=3, stop_ids=stop), 3) == (7, 7, 7)
    assert set(generate(null(avoid=frozenset(range(1, VOCAB))), request(PROMPT), 4)) == {0}
    with pytest.raises(KernelError, match="leave no token"):
        generate(null(avoid=frozenset({7})), request(PROMPT, min_tokens=3, stop_ids=stop), 1)
    with pytest.raises(KernelError, match="avoid leaves none"):
        null(avoid=frozenset(range(VOCAB)))


def test_scripted_text() -> None:
    script = (11, 12, 13)
    assert generate(null(choose=lambda item: script[item.num_generated]), request(PROMPT), 3) == script


def test_logprobs_on_request() -> None:
    def result(logprobs: int | None) -> EntryResult:
        return null().execute(plan(entry(request(PROMPT, logprobs=logprobs), PROMPT, 0, 6, (0, 1)))).entries[0]

    assert result(None).logprobs == ()
    assert result(0).logprobs[0].top == ()
    (logprobs,) = result(3).logprobs
    assert logprobs.top[0] == (result(3).token_ids[0], logprobs.logprob)
    assert len(logprobs.top) == 3
    assert [value for _, value in logprobs.top] == sorted((value for _, value in logprobs.top), reverse=True)


# Plans that must be refused.

REQ = request(PROMPT)


def whole(table: tuple[int, ...] = (0, 1), **changes: object) -> StepEntry:
    return entry(REQ, PROMPT, 0, 6, table)._replace(**changes)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (whole((0,)), r"rows \[0, 6\) do not fit 1 blocks"),
        (whole((0, 0)), "holds a block twice"),
        (whole((0, 32)), "block 32 is outside the pool"),
        (whole((-1, 0)), "block -1 is outside the pool"),
        (whole(token_ids=()), "has no rows"),
        (whole(token_ids=(3, 1, 4, 1, 5, 50)), "token 50 is outside the vocabulary"),
        (whole(token_ids=(3, 1, 4, 1, 5, 8)), "position 5 is token 9, got 8"),
        (whole(samples=False), "does not sample after 6 tokens"),
        (whole(num_generated=1), "samples after 6 tokens, but has 6 prompt and 1 generated"),
        (entry(REQ, PROMPT, 0, 5, (0, 1))._replace(samples=True), "samples after 5 tokens"),
        (entry(REQ, PROMPT, 2, 4, (0, 1)), "position 0 counts as computed, but the cache holds nothing there"),
        (entry(REQ, (*PROMPT, 8), 0, 7, (0, 1)), "rows end at 7, but only 6 tokens are known"),
        (whole(start=-1), "leave the context"),
        (whole(start=59, block_table=tuple(range(20))), "leave the context of 64 tokens"),
    ],
)
def test_refuses_a_wrong_entry(bad: StepEntry, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        null().execute(plan(bad))


def test_refuses_a_wrong_plan() -> None:
    with pytest.raises(KernelError, match="num_rows 7 is not the sum"):
        null().execute(StepPlan(0, (whole(),), 7, ()))
    with pytest.raises(KernelError, match="stands twice"):
        null().execute(plan(whole(), whole((2, 3))))
    with pytest.raises(KernelError, match="writes into block 1, which another entry"):
        null().execute(plan(whole(), whole((2, 1), seq_id=1)))


def test_refuses_a_gap() -> None:
    backend = null()
    backend.execute(plan(entry(REQ, PROMPT, 0, 2, (0, 1))))
    with pytest.raises(KernelError, match="position 2 counts as computed, but the cache holds nothing"):
        backend.execute(plan(entry(REQ, PROMPT, 3, 3, (0, 1))))


def test_accepts_a_shared_prefix_and_refuses_a_false_one() -> None:
    prompt = (1, 2, 3, 4, 5)
    backend = null()
    backend.execute(plan(entry(request(prompt), prompt, 0, 5, (0, 1))))
    backend.execute(plan(entry(request(prompt, "twin"), prompt, 4, 1, (0, 2), seq_id=1)))
    other = (1, 2, 9, 4, 5)
    with pytest.raises(KernelError, match="position 2 counts as computed, but the cache holds another text's token"):
        backend.execute(plan(entry(request(other, "other"), other, 4, 1, (0, 3), seq_id=2)))
    salted = request(prompt, "salted", cache_salt="s")
    with pytest.raises(KernelError, match="position 0 counts as computed, but the cache holds another text's token"):
        backend.execute(plan(entry(salted, prompt, 4, 1, (0, 4), seq_id=3)))


def test_refuses_a_block_taken_while_its_owner_lives() -> None:
    backend = null()
    (first,) = backend.execute(plan(whole())).entries
    other = request((8, 8), "other")
    backend.execute(plan(entry(other, (8, 8), 0, 2, (0,), seq_id=1)))
    with pytest.raises(KernelError, match="position 0 counts as computed, but the cache holds another text's token"):
        backend.execute(plan(entry(REQ, PROMPT + first.token_ids, 6, 1, (0, 1))))


def test_a_block_may_be_used_again_once_its_owner_is_gone() -> None:
    backend = null()
    backend.execute(plan(whole()))
    backend.forget(0)
    backend.forget(0)
    assert backend.execute(plan(whole((1, 0), seq_id=1))).entries[0].error is None


# Faults.


@pytest.fixture
def pair() -> StepPlan:
    return plan(whole(), entry(request((7,), "bad"), (7,), 0, 1, (2,), seq_id=1))


def test_an_error_result_concerns_one_entry(pair: StepPlan) -> None:
    good, bad = null(faults=(Fault(request_id="bad", kind="error", message="boom"),)).execute(pair).entries
    assert good.error is None
    assert len(good.token_ids) == 1
    assert bad == EntryResult(error="boom")


@pytest.mark.parametrize("kind", ["raise", "raise_step"])
def test_a_raising_request_is_found_by_running_entries_alone(pair: StepPlan, kind: str) -> None:
    backend = null(faults=(Fault(request_id="bad", kind=kind),))  # type: ignore[arg-type]
    clean = null().execute(pair).entries
    with pytest.raises(ScriptedFaultError, match="request bad: scripted fault"):
        backend.execute(pair)
    assert backend.execute(plan(pair.entries[0])).entries == clean[:1]
    with pytest.raises(ScriptedFaultError):
        backend.execute(plan(pair.entries[1]))


def test_faults_may_come_late_and_end(pair: StepPlan) -> None:
    late = null(faults=(Fault(request_id="r", kind="error", after=2),))
    assert len(generate(late, REQ, 2)) == 2
    once = null(faults=(Fault(request_id="bad", kind="raise_step", times=1),))
    with pytest.raises(ScriptedFaultError):
        once.execute(pair)
    assert once.execute(pair) == null().execute(pair)


def test_steps_may_take_time(pair: StepPlan) -> None:
    slept: list[float] = []
    duration: Callable[[StepPlan], float] = lambda step: 0.5 * step.num_rows  # noqa: E731
    null(duration=duration, sleep=slept.append).execute(pair)
    assert slept == [3.5]
    with pytest.raises(KernelError, match="sleep goes with"):
        null(duration=duration)
    with pytest.raises(KernelError, match="sleep goes with"):
        null(sleep=slept.append)


def test_a_stalling_request_makes_the_step_longer(pair: StepPlan) -> None:
    slept: list[float] = []
    stall = Fault(request_id="bad", kind="stall", seconds=1.5, times=1)
    backend = null(faults=(stall,), sleep=slept.append)
    assert backend.execute(pair) == backend.execute(pair) == null().execute(pair)
    assert slept == [1.5]
    with pytest.raises(KernelError, match="sleep goes with"):
        null(faults=(stall,))


def test_numbers_that_are_none(pair: StepPlan) -> None:
    good, bad = null(faults=(Fault(request_id="bad", kind="nan"),)).execute(pair).entries
    assert good == null().execute(pair).entries[0]
    assert math.isnan(bad.logprobs[0].logprob)


def test_a_marker_in_the_prompt_makes_guilty(pair: StepPlan) -> None:
    good, bad = null(faults=(Fault(marker=7, kind="error"),)).execute(pair).entries
    assert (good.error, bad.error) == (None, "scripted fault")
    with pytest.raises(KernelError, match="request_id or marker"):
        Fault(kind="error")
    with pytest.raises(KernelError, match="request_id or marker"):
        Fault(request_id="r", marker=7, kind="error")


def test_close_is_final_and_idempotent(pair: StepPlan) -> None:
    backend = null()
    backend.close()
    backend.close()
    with pytest.raises(EngineClosedError):
        backend.execute(pair)
