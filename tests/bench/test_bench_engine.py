"""The benchmark on the null backend: real scheduler, real engine, real text; no model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "engine"))

from engine_support import VOCAB, byte_tokenizer

from shoal.backends.null import Fault, NullBackend
from shoal.bench.engine import Subject, check_fit, measure, run_round
from shoal.bench.stopwatch import StepRecord
from shoal.bench.summary import prompt_rows, summarize
from shoal.bench.work import Work
from shoal.core.params import SamplingParams
from shoal.core.plan import CacheShape
from shoal.errors import ConfigError, RequestFailedError
from shoal.perf.ceilings import Ceilings, Rate, ScaledRate
from shoal.perf.step_cost import Matrix, model_cost, plan_rows, step_cost

WORK = Work(prompt_len=20, output_len=6)
COST = model_cost(
    body=[Matrix(8, 8, "int8")],
    head=Matrix(16, 8, "int8"),
    weight_bytes=192,
    kv_bytes_per_token=16,
    num_layers=1,
    num_heads=1,
    head_dim=16,
    attention_path="fp32",
)


def rate(value: float) -> ScaledRate:
    return ScaledRate(Rate(value, value), Rate(value, value))


def limits(paths: Sequence[str] | None = None, *, speed: float = 1e9) -> Ceilings:
    return Ceilings(
        threads=2, stream_bytes=1024, reads={1024: rate(speed)}, peaks={"int8": rate(speed), "fp32": rate(speed)}
    )


def subject(*, blocks: int = 64, faults: tuple[Fault, ...] = (), budget: int = 32) -> Subject:
    return Subject(
        backend=NullBackend(CacheShape(blocks, 16, 1, 1, 16, "f32"), VOCAB, 512, faults=faults),
        kernel_times=lambda: {"linear": 1e-9, "sample": 2e-9},
        tokenizer=byte_tokenizer(),
        cost=COST,
        params=SamplingParams(temperature=0.0),
        token_budget=budget,
        threads=2,
        cores=2,
    )


def test_a_round_runs_every_token_asked_for() -> None:
    steps = run_round(subject(), WORK, 5, seed=1)
    assert sum(map(prompt_rows, steps)) == 5 * 20
    assert sum(step.tokens for step in steps) == 5 * 6
    prompts = {token for step in steps for entry in step.plan.entries for token in entry.request.prompt_ids}
    assert not any(byte_tokenizer().is_control(token) for token in prompts)
    assert all(entry.request.stop_ids == frozenset() for step in steps for entry in step.plan.entries)
    assert all(not step.plan.preempted for step in steps)


def test_parts_of_a_step_add_up() -> None:
    for step in run_round(subject(), WORK, 3, seed=0):
        parts = step.split()
        assert sum(parts.values()) == pytest.approx(step.seconds)
        assert parts["linear"] == 1e-9
        assert parts["sampling"] == 2e-9
        assert "sample" not in parts
        assert min(parts["packing"], parts["scheduling"], parts["text"], parts["rest"]) > 0


def test_the_same_seed_gives_the_same_steps() -> None:
    plans = [[plan_rows(step.plan) for step in run_round(subject(), WORK, 4, seed=9)] for _ in range(2)]
    assert plans[0] == plans[1]


def test_a_mixed_load_shares_steps_between_prompts_and_decodes() -> None:
    steps = run_round(subject(), replace(WORK, prompt_len=100, output_len=40, mixed=True), 4, seed=0)
    assert max(len(step.plan.entries) for step in steps) == 4
    assert any(0 < prompt_rows(step) < step.plan.num_rows for step in steps)


def test_a_failed_request_is_no_result() -> None:
    with pytest.raises(RequestFailedError, match="scripted fault"):
        run_round(subject(faults=(Fault(request_id="1", kind="error"),)), WORK, 3, seed=0)


def test_a_report_has_every_batch_and_its_own_warnings() -> None:
    asked: list[Sequence[str] | None] = []
    notices: list[tuple[int, int, str]] = []

    def measured(paths: Sequence[str] | None) -> Ceilings:
        asked.append(paths)
        return limits(speed=1e9 * len(asked))

    report = measure(
        subject(),
        WORK,
        [1, 4],
        rounds=2,
        seed=0,
        measure_ceilings=measured,
        notice=lambda done, total, what: notices.append((done, total, what)),
    )
    assert asked == [None, ("int8", "fp32")]
    assert report.ceilings.bandwidth == 2e9, "the higher of the two"
    assert any("moved during the run: int8 +100%" in line for line in report.warnings)
    assert [item.batch for item in report.results] == [1, 4]
    assert report.beside == ()
    assert [done for done, _, _ in notices] == list(range(5))
    assert {total for _, total, _ in notices} == {5}
    assert [what for _, _, what in notices[1:3]] == ["batch 1, round 1 of 2", "batch 4, round 1 of 2"]
    for figures in report.results:
        record = figures.as_record()
        assert record["requests"] == figures.batch
        assert record["prefill_tokens_per_s"] > 0
        low, high = record["spread"]["decode_tokens_per_s"]
        assert low <= record["decode_tokens_per_s"] <= high
        assert record["ceiling_fraction"] == pytest.approx(
            record["decode_tokens_per_s"] / record["ceiling_tokens_per_s"], rel=0.5
        )
        assert record["step_ms_p50"] <= record["step_ms_p99"]
        assert sum(record["split_ms"].values()) == pytest.approx(record["step_ms_mean"])
        assert record["bound_by"] in {"memory", "int8", "fp32"}


def test_neighbours_are_measured_beside() -> None:
    report = measure(subject(), WORK, [2], rounds=1, seed=0, measure_ceilings=lambda paths: limits(), neighbours=1)
    (item,) = report.beside
    record = item.as_record()
    assert record["slowdown"] == pytest.approx(record["step_ms_p50_beside"] / record["step_ms_p50_alone"])
    assert record["fair_slowdown"] == 1.5
    assert record["neighbours"] == 1
    assert item.taken_cores >= 0


@pytest.mark.parametrize(
    ("work", "batches", "field"),
    [
        (Work(prompt_len=510, output_len=3), [1], "prompt_len"),
        (Work(prompt_len=100, output_len=28), [1, 9], "batch"),
    ],
)
def test_work_that_does_not_fit_names_the_option(work: Work, batches: list[int], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        measure(subject(), work, batches, rounds=1, seed=0, measure_ceilings=lambda paths: limits())
    assert caught.value.field == field
    check_fit(work, [1], 1000, 64, 16)


def test_phases_divide_at_the_last_prompt_token() -> None:
    steps = run_round(subject(budget=32), WORK, 4, seed=0)
    figures = summarize(4, [steps], COST, limits(), mixed=False)
    last = max(index for index, step in enumerate(steps) if prompt_rows(step))
    assert figures.prefill.steps == last + 1
    assert figures.decode.steps == len(steps) - last - 1
    prefill = sum(step.seconds for step in steps[: last + 1])
    decode = steps[last + 1 :]
    assert figures.prefill.tokens_per_s.median == pytest.approx(80 / prefill)
    assert figures.decode.tokens_per_s.median == pytest.approx(
        sum(step.tokens for step in decode) / sum(step.seconds for step in decode)
    )
    assert figures.output_tokens_per_s.median == pytest.approx(24 / sum(step.seconds for step in steps))
    assert 0 < figures.decode.mean_batch <= 4


def test_a_mixed_load_holds_both_kinds_of_tokens_against_the_whole_run() -> None:
    steps = run_round(subject(), WORK, 4, seed=0)
    figures = summarize(4, [steps], COST, limits(), mixed=True)
    seconds = sum(step.seconds for step in steps)
    assert figures.prefill.tokens_per_s.median == pytest.approx(80 / seconds)
    assert figures.decode.tokens_per_s.median == pytest.approx(24 / seconds)
    assert figures.decode.steps == len(steps)


def test_ceilings_are_the_least_times_of_exactly_these_steps() -> None:
    steps = run_round(subject(), WORK, 4, seed=0)
    slow = summarize(4, [steps], COST, limits(speed=1e3), mixed=True)
    least = sum(
        max(cost.bytes, sum(cost.ops.values())) / 1e3
        for cost in (step_cost(COST, plan_rows(step.plan)) for step in steps)
    )
    assert slow.decode.ceiling_tokens_per_s == pytest.approx(24 / least)
    assert slow.decode.bound_by == "fp32", "attention is most of this little model"
    fast = summarize(4, [steps], COST, limits(speed=2e3), mixed=True)
    assert fast.decode.ceiling_fraction == pytest.approx(slow.decode.ceiling_fraction / 2)


def test_medians_and_spreads_are_over_rounds() -> None:
    steps = run_round(subject(), WORK, 1, seed=0)

    def stretched(factor: float) -> list[StepRecord]:
        return [step._replace(seconds=step.seconds * factor) for step in steps]

    figures = summarize(1, [stretched(1), stretched(4), stretched(2)], COST, limits(), mixed=False)
    spread = figures.decode.tokens_per_s
    assert spread.highest == pytest.approx(2 * spread.median) == pytest.approx(4 * spread.lowest)
