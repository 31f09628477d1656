"""The scheduler under any sequence of calls: hypothesis plays the engine and checks every invariant each time."""

from __future__ import annotations

import pytest
from core_support import answer, scored_rows
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.core.params import SamplingParams
from shoal.core.plan import CacheShape, EntryResult, StepPlan, StepResult
from shoal.core.policy import POLICIES
from shoal.core.request import FinishReason, Request
from shoal.core.scheduler import Scheduler, SchedulerConfig
from shoal.errors import InvalidRequestError, QueueFullError

STOP = 7
VOCAB = 9
BLOCK = 4


class SchedulerMachine(RuleBasedStateMachine):
    """Keeps its own account of what every completion must have given."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        blocks=st.integers(2, 24),
        seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        caching=st.booleans(),
        watermark=st.sampled_from([0.0, 0.1]),
        score_budget=st.integers(1, 8),
        ageing=st.sampled_from([None, 1.5]),
    )
    def begin(
        self,
        *,
        policy: str,
        blocks: int,
        seqs: int,
        budget: int,
        caching: bool,
        watermark: float,
        score_budget: int,
        ageing: float | None,
    ) -> None:
        self.blocks = blocks
        self.config = SchedulerConfig(
            max_num_seqs=seqs,
            token_budget=budget,
            max_waiting=12,
            policy=policy,
            prefix_caching=caching,
            watermark=watermark,
            score_budget=score_budget,
            priority_ageing=ageing,
        )
        self.scheduler = Scheduler(self.config, CacheShape(blocks, BLOCK, 1, 1, 16, "f32"))
        self.live: dict[tuple[str, int], Request] = {}
        self.given: dict[tuple[str, int], list[int]] = {}
        self.scored: set[tuple[str, int]] = set()  # that were told their prompt's log-probabilities
        self.seq_ids: dict[int, tuple[str, int]] = {}
        self.plan: StepPlan | None = None
        self.number = 0
        self.time = 0.0

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=0, max_size=20),
        max_tokens=st.integers(0, 20),
        scored=st.booleans(),
        n=st.integers(1, 3),
        salt=st.sampled_from([None, "a"]),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from(["", "x", "y"]),
        deadline=st.sampled_from([None, 1.0, 5.0]),
        penalty=st.sampled_from([0.0, 0.5]),
        min_tokens=st.integers(0, 2),
    )
    def add(
        self,
        *,
        prompt: list[int],
        max_tokens: int,
        scored: bool,
        n: int,
        salt: str | None,
        priority: int,
        tenant: str,
        deadline: float | None,
        penalty: float,
        min_tokens: int,
    ) -> None:
        self.number += 1
        scored = scored and len(prompt) > 1
        max_tokens = max(max_tokens, 0 if scored else 1)  # as ``resolve`` has it
        request = Request(
            request_id=f"r{self.number}",
            prompt_ids=tuple(prompt),
            params=SamplingParams(
                n=n,
                presence_penalty=penalty,
                min_tokens=min(min_tokens, max_tokens),
                prompt_logprobs=0 if scored else None,
            ),
            max_tokens=max_tokens,
            stop_ids=frozenset({STOP}),
            seed=0,
            priority=priority,
            deadline=deadline,
            cache_salt=salt,
            tenant=tenant,
            weight=2.0 if tenant == "x" else 1.0,
        )
        waiting = self.scheduler.stats().waiting
        try:
            self.scheduler.add(request, self.time)
        except InvalidRequestError:
            assert not prompt or -(-(len(prompt) + max(max_tokens, 1) - 1) // BLOCK) > self.blocks
            return
        except QueueFullError:
            assert waiting + n > 12
            return
        for index in range(n):
            self.live[request.request_id, index] = request
            self.given[request.request_id, index] = []

    @rule()
    def add_again(self) -> None:
        if not self.live:
            return
        request = next(iter(self.live.values()))
        with pytest.raises(InvalidRequestError, match="request_id"):
            self.scheduler.add(request, self.time)

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self) -> None:
        self.time += 1
        before = {sequence.seq_id for _, sequence in self.scheduler._running}
        self.plan = self.scheduler.schedule(self.time)
        entries = self.plan.entries
        assert bool(entries) == bool(self.live)
        assert self.plan.num_rows == sum(len(entry.token_ids) for entry in entries) <= self.config.token_budget
        assert len(entries) <= self.config.max_num_seqs
        assert len({entry.seq_id for entry in entries}) == len(entries)
        assert not {entry.seq_id for entry in entries} & set(self.plan.preempted) or self.config.policy == "priority"
        written: set[int] = set()
        for entry in entries:
            key = (entry.request.request_id, entry.index)
            assert self.seq_ids.setdefault(entry.seq_id, key) == key
            tokens = [*entry.request.prompt_ids, *self.given[key]]
            end = entry.start + len(entry.token_ids)
            assert list(entry.token_ids) == tokens[entry.start : end]
            assert entry.samples == (end == len(tokens) and entry.request.max_tokens > 0)
            assert not entry.scores or (entry.index == 0 and key not in self.scored and entry.num_scored > 0)
            if entry.index == 0 and entry.request.num_scored and key not in self.scored:
                assert entry.scores == (entry.start < len(entry.request.prompt_ids) - 1)
            assert entry.num_generated == len(self.given[key])
            assert entry.history == (tuple(tokens) if entry.request.params.penalized else ())
            assert len(entry.block_table) * BLOCK >= end
            touched = set(entry.block_table[entry.start // BLOCK : (end - 1) // BLOCK + 1])
            assert not touched & written, "two sequences write one block"
            written |= touched
        assert sum(entry.num_scored for entry in entries) <= self.config.score_budget
        # The first in order of those that stayed is always served; who came in may find the score budget used up.
        stayed = [key for key, sequence in self.scheduler._running if sequence.seq_id in before]
        if stayed:
            assert any(self.scheduler._by_id[entry.seq_id].key == stayed[0] for entry in entries)

    @precondition(lambda self: self.plan is not None)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        results = []
        for entry in plan.entries:
            if data.draw(st.integers(0, 19)) == 0:
                results.append(EntryResult(error="fault"))
            elif entry.samples:
                token = data.draw(st.integers(0, VOCAB - 1))
                results.append(EntryResult((token,), prompt_logprobs=scored_rows(entry)))
            else:
                results.append(EntryResult(prompt_logprobs=scored_rows(entry)))
        deltas = {delta.seq_id: delta for delta in self.scheduler.commit(plan, StepResult(tuple(results)))}
        for entry, result in zip(plan.entries, results, strict=True):
            key = (entry.request.request_id, entry.index)
            delta = deltas.pop(entry.seq_id, None)
            only_scored = entry.request.max_tokens == 0 and entry.start + len(entry.token_ids) == len(
                entry.request.prompt_ids
            )
            if key not in self.live or (not entry.samples and not only_scored and result.error is None):
                assert delta is None
                continue
            assert delta is not None
            if result.error is not None:
                assert (delta.finish, delta.error) == (FinishReason.ERROR, "fault")
                del self.live[key]
                continue
            first = entry.index == 0 and key not in self.scored
            expected = range(entry.request.num_scored) if first else ()
            assert [item.logprob for item in delta.prompt_logprobs] == [-float(position) for position in expected]
            self.scored.add(key)
            if only_scored:
                assert (delta.finish, delta.token_ids) == (FinishReason.LENGTH, ())
                del self.live[key]
                continue
            before = len(self.given[key])
            self.given[key] += delta.token_ids
            assert delta.token_ids == result.token_ids
            stopped = delta.token_ids[0] == STOP and before >= entry.request.params.min_tokens
            reason = (
                FinishReason.STOP
                if stopped
                else FinishReason.LENGTH
                if before + 1 == entry.request.max_tokens
                else None
            )
            assert delta.finish == reason
            if reason is not None:
                del self.live[key]
        assert not deltas

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([*sorted({key[0] for key in self.live}), "unknown"]))
        deltas = self.scheduler.abort(name)
        expected = {key for key in self.live if key[0] == name}
        assert {(delta.request_id, delta.index) for delta in deltas} == expected
        assert all(delta.finish is FinishReason.ABORT for delta in deltas)
        for key in expected:
            del self.live[key]

    @precondition(lambda self: self.plan is not None and len(self.plan.entries) > 0)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        assert self.plan is not None
        entry = data.draw(st.sampled_from(self.plan.entries))
        self.scheduler.finish(entry.seq_id, FinishReason.STOP)
        self.live.pop((entry.request.request_id, entry.index), None)

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            assert self.scheduler.has_work() == bool(self.live)

    def teardown(self) -> None:
        """Whatever was admitted finishes, in a bounded number of steps, and every block is free at the end."""
        if not hasattr(self, "scheduler"):
            return
        if self.plan is not None:
            self.scheduler.commit(self.plan, _plain(self.plan))
        limit = 200 + sum(40 + len(request.prompt_ids) for request in self.live.values()) * 40
        for _ in range(limit):
            if not self.scheduler.has_work():
                break
            plan = self.scheduler.schedule(self.time)
            self.scheduler.check()
            self.scheduler.commit(plan, _plain(plan))
            self.scheduler.check()
        assert not self.scheduler.has_work()
        assert self.scheduler.stats().used_blocks == 0


def _plain(plan: StepPlan) -> StepResult:
    return answer(plan)


SchedulerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
TestScheduler = SchedulerMachine.TestCase
