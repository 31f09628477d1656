"""The step loop: drain the inbox, schedule, execute, commit, make text, hand out.

Everything mutable here belongs to the thread that calls ``step`` (see ``thread``). Two doors lead in and out: the
inbox, and one call per step and outbox with all its chunks. Faults stay where they happen:

- a request the scheduler refuses fails alone;
- an exception while executing a step is traced by running the step's entries one by one, which is safe because
  executing is idempotent; the entries that fail alone too end with an error, the rest have their results;
- an exception while making a request's text ends that request;
- an outbox that raises is taken for gone, its requests are aborted;
- a result that holds no numbers (a model with NaN in it) ends its request;
- anything else is a bug in the engine itself: ``die`` tells every waiting caller, and nothing is accepted any more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import isnan

from shoal.backends.base import Backend
from shoal.core.plan import EntryResult, StepEntry, StepPlan, StepResult, TokenDelta
from shoal.core.request import FinishReason, Request
from shoal.core.scheduler import Scheduler, SchedulerStats
from shoal.engine.inbox import Inbox
from shoal.engine.messages import Abort, Chunk, Close, Message, Outbox, Submit
from shoal.engine.request import Limits
from shoal.errors import EngineDeadError, KernelError, ShoalError
from shoal.metrics.timeline import RequestTimeline
from shoal.text.stream import TextStream
from shoal.text.tokenizer import Tokenizer

SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_MEMORY = 0.05  # of the mean step: weight of the newest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What the engine did since it was made, as of the last step.

    steps: steps that computed something.
    step_sequences: sequences in them, summed; over ``steps`` it is the mean batch.
    step_rows: rows in them, summed.
    generated_tokens: tokens handed out.
    prompt_tokens: tokens of the prompts of requests that came to run, each prompt once.
    finished: completions that ended, by the reason.
    busy_seconds: in steps that computed something, in all. step_seconds: of one of them, a mean of the latest.
    batch_sizes, step_sizes: steps by their sequences and by their rows: how many were in each of ``SIZE_BOUNDS``'
        ranges, whose upper ends count as inside, and above all of them.
    scheduler: the scheduler's own numbers.
    """

    steps: int = 0
    step_sequences: int = 0
    step_rows: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    busy_seconds: float = 0.0
    step_seconds: float = 0.0
    finished: Mapping[FinishReason, int] = field(default_factory=dict)
    batch_sizes: tuple[int, ...] = ()
    step_sizes: tuple[int, ...] = ()
    scheduler: SchedulerStats

    @property
    def mean_batch(self) -> float:
        """Sequences per step, on average."""
        return self.step_sequences / self.steps if self.steps else 0.0


@dataclass(slots=True)
class _Text:
    """A completion's text so far."""

    stream: TextStream
    num_tokens: int = 0


@dataclass(slots=True)
class _Live:
    """A request between submit and its last chunk."""

    request: Request
    outbox: Outbox
    timeline: RequestTimeline
    unfinished: int
    texts: dict[int, _Text] = field(default_factory=dict)  # by completion, made with its first token


class Engine:
    """One model being served. All but ``inbox``, ``clock``, ``limits``, ``stats`` and ``in_step`` belongs to the
    stepping thread.

    clock: gives seconds; only differences matter.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        inbox: Inbox,
        clock: Callable[[], float],
    ) -> None:
        shape = backend.cache_shape
        self.inbox = inbox
        self.clock = clock
        self.limits = Limits(
            context_length=backend.context_length,
            vocab_size=backend.vocab_size,
            pool_tokens=shape.num_tokens,
            max_waiting=inbox.max_waiting,
            eos_ids=frozenset(tokenizer.eos_ids),
            check_grammar=backend.check_grammar,
        )
        self._backend = backend
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._live: dict[str, _Live] = {}
        self._owners: dict[int, _Live] = {}  # of the sequences that have been in a plan
        self._chunks: dict[Outbox, list[Chunk]] = {}  # of this step
        self._closing = False
        self._rounds = 0
        self.in_step: int | None = None  # the number of the round that is going on, to see whether one gets stuck
        self._steps = self._step_sequences = self._step_rows = self._generated = self._prompt_tokens = 0
        self._busy_seconds = self._step_seconds = 0.0
        self._finished = dict.fromkeys(FinishReason, 0)
        self._batch_sizes, self._step_sizes = ([0] * (len(SIZE_BOUNDS) + 1) for _ in range(2))
        self.stats = self._make_stats()

    @property
    def ended(self) -> bool:
        """Whether the engine was closed and has nothing left to do."""
        return self._closing and not self._live

    def has_work(self) -> bool:
        """Whether a step would do something without a new message."""
        return self._scheduler.has_work()

    def step(self) -> None:
        """One round of the loop. An exception is an internal error; ``die`` must follow."""
        self._rounds += 1
        self.in_step = self._rounds
        self._step()
        self.in_step = None

    def _step(self) -> None:
        now = self.clock()
        self._drain_inbox()
        plan = self._scheduler.schedule(now)
        if plan.entries:
            self._note_step(plan, now)
            result = self._execute(plan)
            self._charge(plan, self.clock() - now)
            deltas = self._scheduler.commit(plan, result)
            self._make_chunks(deltas)
            self._note_time(self.clock() - now)
        self._publish()  # first, so that whoever has got its chunks reads statistics that know them
        self._hand_out()

    def die(self, error: EngineDeadError) -> None:
        """Tell everybody who waits that nothing will come; refuse everything from now on."""
        left = self.inbox.die(error)
        waiting = {live.outbox for live in self._live.values()}
        waiting.update(message.outbox for message in left if isinstance(message, Submit))
        self._live.clear()
        for outbox in waiting:
            try:
                outbox.fail(error)
            except Exception:  # that caller is gone, the others still wait
                continue

    def close_backend(self) -> None:
        """Free the model."""
        self._backend.close()

    # Drain the inbox.

    def _drain_inbox(self) -> None:
        for message in self.inbox.take():
            self._obey(message)

    def _obey(self, message: Message) -> None:
        match message:
            case Submit():
                self._admit(message)
            case Abort(request_id):
                self._abort(request_id)
            case Close(drain):
                self._closing = True
                if not drain:
                    for request_id in list(self._live):
                        self._abort(request_id)

    def _admit(self, message: Submit) -> None:
        request = message.request
        timeline = RequestTimeline(message.arrived)
        live = _Live(request, message.outbox, timeline, request.params.n)
        try:
            self._scheduler.add(request, message.arrived)
        except ShoalError as error:
            self._finished[FinishReason.ERROR] += request.params.n
            for index in range(request.params.n):
                self._put(live, Chunk(request.request_id, index, finish=FinishReason.ERROR, error=str(error)))
            return
        self._live[request.request_id] = live

    def _abort(self, request_id: str) -> None:
        if request_id in self._live:
            self._make_chunks(self._scheduler.abort(request_id))

    # Execute.

    def _execute(self, plan: StepPlan) -> StepResult:
        try:
            return self._run(plan)
        except Exception:
            return StepResult(tuple(self._execute_alone(plan, entry) for entry in plan.entries))

    def _execute_alone(self, plan: StepPlan, entry: StepEntry) -> EntryResult:
        alone = StepPlan(plan.step_id, (entry,), len(entry.token_ids), ())
        try:
            return self._run(alone).entries[0]
        except Exception as error:
            return _failed(error)

    def _run(self, plan: StepPlan) -> StepResult:
        result = self._backend.execute(plan)
        if len(result.entries) != len(plan.entries):
            raise KernelError(f"the backend gave {len(result.entries)} results for {len(plan.entries)} entries")
        if any(_holds_nan(entry) for entry in result.entries):
            return StepResult(tuple(_NOT_FINITE if _holds_nan(entry) else entry for entry in result.entries))
        return result

    # Make text.

    def _make_chunks(self, deltas: Iterable[TokenDelta]) -> None:
        at = self.clock()
        for delta in deltas:
            live = self._live[delta.request_id]
            chunk = self._make_chunk(live, delta)
            self._generated += len(chunk.token_ids)
            if chunk.token_ids:
                live.timeline.add_token(chunk.index, at, len(chunk.token_ids))
            if chunk.finish is not None:
                self._finished[chunk.finish] += 1
                self._forget(delta.seq_id)
                chunk = self._close_completion(live, chunk, at)
            self._put(live, chunk)

    def _make_chunk(self, live: _Live, delta: TokenDelta) -> Chunk:
        """The delta with its text. A stop string found here ends the sequence, as does an exception."""
        try:
            text, taken, stopped = self._detokenize(live, delta)
        except Exception as error:
            if delta.finish is None:
                self._scheduler.finish(delta.seq_id, FinishReason.ERROR)
            return Chunk(delta.request_id, delta.index, finish=FinishReason.ERROR, error=_describe(error))
        finish = delta.finish
        if stopped:
            if finish is None:
                self._scheduler.finish(delta.seq_id, FinishReason.STOP)
            finish = FinishReason.STOP
        return Chunk(
            delta.request_id,
            delta.index,
            text,
            delta.token_ids[:taken],
            delta.logprobs[:taken],
            finish,
            delta.error,
            delta.prompt_logprobs,
        )

    def _detokenize(self, live: _Live, delta: TokenDelta) -> tuple[str, int, bool]:
        """The text that is now certain, how many of the tokens it took, and whether a stop string ended it."""
        params = live.request.params
        output = live.texts.get(delta.index)
        if output is None:
            output = live.texts[delta.index] = _Text(TextStream(self._tokenizer, params.stop))
        stream = output.stream
        # A constraint that allows nothing more ends a completion too, with its last token shown.
        ends_with_stop_token = delta.finish is FinishReason.STOP and delta.token_ids[-1] in live.request.stop_ids
        shown = delta.token_ids[:-1] if ends_with_stop_token else delta.token_ids
        parts = []
        for count, token in enumerate(shown, 1):
            parts.append(stream.push(token, stop_allowed=output.num_tokens >= params.min_tokens))
            output.num_tokens += 1
            if stream.stopped:
                return "".join(parts), count, True
        if delta.finish is not None:
            parts.append(stream.flush())
        return "".join(parts), len(delta.token_ids), stream.stopped

    def _close_completion(self, live: _Live, chunk: Chunk, at: float) -> Chunk:
        live.texts.pop(chunk.index, None)
        live.unfinished -= 1
        if live.unfinished:
            return chunk
        del self._live[chunk.request_id]
        live.timeline.finish(at)
        return chunk._replace(timeline=live.timeline)

    # Hand out.

    def _put(self, live: _Live, chunk: Chunk) -> None:
        self._chunks.setdefault(live.outbox, []).append(chunk)

    def _hand_out(self) -> None:
        chunks, self._chunks = self._chunks, {}
        for outbox, given in chunks.items():
            try:
                outbox.deliver(given)
            except Exception:  # the caller is gone (a closed event loop, say); nobody is left to tell
                self._drop(outbox)
                self._publish()

    def _drop(self, outbox: Outbox) -> None:
        """End all requests of an outbox that cannot take anything any more."""
        for request_id in [name for name, live in self._live.items() if live.outbox is outbox]:
            del self._live[request_id]
            for delta in self._scheduler.abort(request_id):
                self._finished[FinishReason.ABORT] += 1
                self._forget(delta.seq_id)

    def _forget(self, seq_id: int) -> None:
        self._owners.pop(seq_id, None)
        self._backend.forget(seq_id)

    def _note_step(self, plan: StepPlan, now: float) -> None:
        """Before the plan runs: what a sequence's end would make unknown."""
        for seq_id in plan.preempted:
            owner = self._owners.get(seq_id)
            if owner is not None:  # else admitted with a static batch, and preempted before its first row
                owner.timeline.preemptions += 1
        for entry in plan.entries:
            if entry.seq_id not in self._owners:
                live = self._owners[entry.seq_id] = self._live[entry.request.request_id]
                if live.timeline.admitted is None:
                    self._prompt_tokens += len(entry.request.prompt_ids)
                    live.timeline.admit(now)
                    live.timeline.cached_tokens = self._scheduler.cached_tokens(entry.seq_id)
        self._steps += 1
        self._step_sequences += len(plan.entries)
        self._step_rows += plan.num_rows
        self._batch_sizes[bisect_left(SIZE_BOUNDS, len(plan.entries))] += 1
        self._step_sizes[bisect_left(SIZE_BOUNDS, plan.num_rows)] += 1

    def _charge(self, plan: StepPlan, seconds: float) -> None:
        """Share a step's time among those who rode in it, by rows."""
        per_row, batch, owners = seconds / plan.num_rows, len(plan.entries), self._owners
        for entry in plan.entries:
            owners[entry.seq_id].timeline.charge(per_row * len(entry.token_ids), batch)

    def _note_time(self, seconds: float) -> None:
        self._busy_seconds += seconds
        first = not self._step_seconds
        self._step_seconds += (seconds - self._step_seconds) * (1.0 if first else _MEMORY)

    def _publish(self) -> None:
        self.stats = self._make_stats()
        self.inbox.report_waiting(self.stats.scheduler.waiting)

    def _make_stats(self) -> EngineStats:
        return EngineStats(
            steps=self._steps,
            step_sequences=self._step_sequences,
            step_rows=self._step_rows,
            generated_tokens=self._generated,
            prompt_tokens=self._prompt_tokens,
            busy_seconds=self._busy_seconds,
            step_seconds=self._step_seconds,
            finished=self._finished.copy(),
            batch_sizes=tuple(self._batch_sizes),
            step_sizes=tuple(self._step_sizes),
            scheduler=self._scheduler.stats(),
        )


_NOT_FINITE = EntryResult(error="the backend gave log-probabilities that are no numbers")


def _holds_nan(result: EntryResult) -> bool:
    return any(isnan(each.logprob) for each in (*result.logprobs, *result.prompt_logprobs))


def _failed(error: Exception) -> EntryResult:
    return EntryResult(error=_describe(error))


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
