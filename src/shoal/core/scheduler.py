"""The scheduler: three verbs and two doors.

``schedule(now)`` decides what the next step runs and gives it the blocks it needs; ``commit(plan, result)`` takes what
came out. Between the two nothing else is decided. ``add`` and ``abort`` (and ``finish``, for stop strings found in the
text) may come at any time in between steps, also between a schedule and its commit.

A step is filled in this order, each within one token budget:

1. sequences that are one token behind (decodes), oldest first; only here can a running sequence need another block;
2. sequences further behind (prefill, or recomputation after preemption), which own their blocks already, in chunks;
3. admissions, while slots, budget and free blocks allow; none in a step that preempted.

Out of blocks, the youngest running sequence that is not yet in the plan loses its blocks and waits to be recomputed.
Hence the oldest running sequence is served in every step, and a step with work is never empty.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.core.block_pool import NO_PREFIX, BlockPool, Match
from shoal.core.errors import InternalError
from shoal.core.fair_share import FairShare
from shoal.core.params import SamplingParams
from shoal.core.plan import CacheShape, EntryResult, StepEntry, StepPlan, StepResult, TokenDelta, TokenLogprobs
from shoal.core.policy import POLICIES
from shoal.core.request import FinishReason, Request
from shoal.core.sequence import Sequence, State
from shoal.core.waiting import WaitingQueue
from shoal.errors import ConfigError, InvalidRequestError, QueueFullError

SCORE_BUDGET = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """max_num_seqs: running at once. token_budget: rows per step.

    max_waiting: completions that may wait when another is added; None where somebody before the scheduler sees to that.
    score_budget: rows of prompts to be scored per step; each takes as much memory for logits as one that samples.
    watermark: part of the pool that admissions leave free for those running to grow into.
    priority_ageing: seconds of waiting that are worth a level of priority; None is never.
    """

    max_num_seqs: int = 64
    token_budget: int = 512
    max_waiting: int | None = 1024
    policy: str = "fcfs"
    prefix_caching: bool = True
    watermark: float = 0.01
    score_budget: int = SCORE_BUDGET
    priority_ageing: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "token_budget", "max_waiting", "score_budget"):
            value = getattr(self, name)
            if name == "max_waiting" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(name, f"must be a positive integer, got {value!r}")
        if self.policy not in POLICIES:
            raise ConfigError("policy", f"must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if not isinstance(self.prefix_caching, bool):
            raise ConfigError("prefix_caching", f"must be true or false, got {self.prefix_caching!r}")
        number = isinstance(self.watermark, (int, float)) and not isinstance(self.watermark, bool)
        if not number or not 0 <= self.watermark < 1:
            raise ConfigError("watermark", f"must be in [0, 1), got {self.watermark!r}")
        if self.priority_ageing is not None and not 0 < self.priority_ageing < math.inf:
            raise ConfigError("priority_ageing", f"must be seconds above 0, got {self.priority_ageing!r}")


class SchedulerStats(NamedTuple):
    """A snapshot. Counts of sequences and blocks are now; preemptions and prefix_hit_tokens are since the start.

    waste: share of the places for tokens in held blocks that hold no token, averaged over the steps so far.
    """

    waiting: int
    running: int
    num_blocks: int
    used_blocks: int
    cached_blocks: int
    peak_blocks: int
    waste: float
    preemptions: int
    prefix_hit_tokens: int


class Scheduler:
    """See the module. Pure: time is an argument, and the same calls give the same plans."""

    def __init__(self, config: SchedulerConfig, cache: CacheShape) -> None:
        self._config = config
        self._policy = replace(POLICIES[config.policy], ageing=config.priority_ageing)
        self._pool = BlockPool(cache.num_blocks, cache.block_size)
        self._block_size = cache.block_size
        self._spare_blocks = int(config.watermark * cache.num_blocks)
        # More running sequences than rows in a step would leave the youngest without any.
        self._most_running = min(config.max_num_seqs, config.token_budget)
        self._share = FairShare()
        self._waiting = WaitingQueue(self._policy, self._share)
        self._running: list[tuple[tuple[float, ...], Sequence]] = []  # ascending by key
        self._held: list[Sequence] = []
        self._by_id: dict[int, Sequence] = {}  # waiting and running
        self._by_request: dict[str, list[Sequence]] = {}  # the same, by request
        self._next_seq_id = 0
        self._step_id = 0
        self._peak_blocks = 0
        self._preemptions = 0
        self._prefix_hit_tokens = 0
        # Room was last made at this count; the head of the queue that did not fit at it need not be tried again.
        self._room_made = 0
        self._did_not_fit: tuple[int, int] | None = None  # (seq_id, count of room made)
        self._could_not_displace: tuple[int, int] | None = None  # the same
        self._score_left = 0  # of this step's score budget
        self._places = 0  # for tokens, in held blocks, summed over steps
        self._empty_places = 0

    # Doors.

    def add(self, request: Request, arrived: float) -> None:
        """Queue a request's ``n`` sequences. ``arrived``: seconds on a clock that is the same for all.

        QueueFullError if they do not all fit into the queue now; InvalidRequestError for an id that is in use, an
        empty prompt, more completions than the queue could ever hold or a length that the whole pool could not.
        """
        count = request.params.n
        if request.request_id in self._by_request:
            raise InvalidRequestError("request_id", f"{request.request_id!r} is in use")
        if not request.prompt_ids:
            raise InvalidRequestError("prompt", "must hold at least one token")
        # The last token is never computed, so it needs no place; a prompt that is only scored is computed whole.
        longest = len(request.prompt_ids) + max(request.max_tokens, 1) - 1
        if self._blocks_for(longest) > self._pool.num_blocks:
            room = self._pool.num_blocks * self._block_size
            raise InvalidRequestError(
                "max_tokens", f"{longest} tokens can never fit the KV cache of {room}; ask for less or raise kv_tokens"
            )
        limit = self._config.max_waiting
        if limit is not None and count > limit:
            raise InvalidRequestError("n", f"the queue holds {limit} completions, got {count}")
        if limit is not None and len(self._waiting) + count > limit:
            raise QueueFullError(limit)
        shared = self._config.prefix_caching
        salt: Hashable = ("salt", request.cache_salt) if shared else ("request", request.request_id)
        sequences = []
        for index in range(count):
            key = (self._policy.order(request, arrived), self._next_seq_id)
            sequence = Sequence(
                seq_id=self._next_seq_id,
                request=request,
                index=index,
                key=key,
                salt=salt,
                publishes=shared or count > 1,
                tokens=list(request.prompt_ids),
                num_prompt=len(request.prompt_ids),
                scored=[] if request.num_scored and index == 0 else None,
            )
            self._next_seq_id += 1
            self._by_id[sequence.seq_id] = sequence
            self._share.enter(request.tenant)
            self._waiting.add(sequence)
            sequences.append(sequence)
        self._by_request[request.request_id] = sequences

    def abort(self, request_id: str) -> tuple[TokenDelta, ...]:
        """End what is left of a request; nothing if it is not known (any more)."""
        return tuple(
            self._end(sequence, FinishReason.ABORT) for sequence in tuple(self._by_request.get(request_id, ()))
        )

    def finish(self, seq_id: int, reason: FinishReason) -> None:
        """End one sequence from outside, as when a stop string was found. Unknown ids are ignored."""
        sequence = self._by_id.get(seq_id)
        if sequence is not None:
            self._end(sequence, reason)

    def has_work(self) -> bool:
        """Whether ``schedule`` would give a step that is not empty."""
        return bool(self._waiting or self._running)

    # Verbs.

    def schedule(self, now: float) -> StepPlan:
        """Decide the next step. Empty only when there is no work."""
        preempted: list[int] = []
        if self._policy.in_batches and not self._running:
            self._release_held()
        if self._policy.displaces:
            self._displace(preempted)
        entries: list[StepEntry] = []
        self._score_left = self._config.score_budget
        budget = self._schedule_decodes(entries, preempted, self._config.token_budget)
        budget = self._schedule_chunks(entries, budget)
        # No step with work is empty: if displacing left nobody running, whoever displaced them comes in at once.
        if not preempted or not entries:
            self._admit(entries, budget)
        if not entries and self.has_work():
            raise InternalError("there is work, but the step is empty")
        if self._policy.fair and self._share.contended:
            for entry in entries:
                self._share.charge(entry.request.tenant, len(entry.token_ids), entry.request.weight)
        self._step_id += 1
        self._note_memory()
        return StepPlan(
            self._step_id, tuple(entries), sum([len(entry.token_ids) for entry in entries]), tuple(preempted)
        )

    def commit(self, plan: StepPlan, result: StepResult) -> tuple[TokenDelta, ...]:
        """Take a step's results. Entries whose sequence ended since are passed over."""
        if len(plan.entries) != len(result.entries):
            raise InternalError(f"{len(result.entries)} results for {len(plan.entries)} entries")
        deltas = []
        by_id = self._by_id
        for entry, outcome in zip(plan.entries, result.entries, strict=True):
            sequence = by_id.get(entry.seq_id)
            if sequence is None:
                continue
            if sequence.num_computed != entry.start or sequence.state is not State.RUNNING:
                raise InternalError(f"sequence {entry.seq_id} is not where the plan left it")
            if outcome.error is not None:
                deltas.append(self._end(sequence, FinishReason.ERROR, error=outcome.error))
                continue
            if entry.scores and sequence.scored is not None:
                if len(outcome.prompt_logprobs) != entry.num_scored:
                    raise InternalError(f"sequence {entry.seq_id} was not scored row by row")
                sequence.scored += outcome.prompt_logprobs
            sequence.num_computed = computed = entry.start + len(entry.token_ids)
            if sequence.publishes and computed >= (sequence.num_published + 1) * self._block_size:
                self._publish(sequence)
            if entry.samples and not outcome.token_ids:
                deltas.append(self._end(sequence, FinishReason.ERROR, error="the backend gave no token"))
            elif entry.samples:
                deltas.append(self._take_tokens(sequence, outcome))
            elif computed == len(sequence.tokens):  # a prompt that was only to be scored
                deltas.append(self._end(sequence, FinishReason.LENGTH, scored=_take_scored(sequence)))
        return tuple(deltas)

    # Reports.

    def stats(self) -> SchedulerStats:
        """How things stand."""
        return SchedulerStats(
            waiting=len(self._waiting),
            running=len(self._running),
            num_blocks=self._pool.num_blocks,
            used_blocks=self._pool.num_blocks - self._pool.num_free,
            cached_blocks=self._pool.num_cached,
            peak_blocks=self._peak_blocks,
            waste=self._empty_places / self._places if self._places else 0.0,
            preemptions=self._preemptions,
            prefix_hit_tokens=self._prefix_hit_tokens,
        )

    def cached_tokens(self, seq_id: int) -> int:
        """How many tokens of a live sequence's prompt were found in the prefix cache; 0 for unknown ids."""
        sequence = self._by_id.get(seq_id)
        return 0 if sequence is None else sequence.num_cached

    def check(self) -> None:
        """InternalError unless every invariant holds."""
        self._pool.check()
        holders: dict[int, int] = {}
        running = [sequence for _, sequence in self._running]
        for sequence in (*running, *self._held):
            for block in sequence.block_table:
                holders[block] = holders.get(block, 0) + 1
        for block in range(self._pool.num_blocks):
            _require(
                self._pool.references(block) == holders.get(block, 0), f"block {block} has other holders than it counts"
            )
        lines = [(line, State.WAITING) for line in self._waiting.lines()]
        for queue, state in (*lines, (self._running, State.RUNNING)):
            keys = [key for key, _ in queue]
            _require(keys == sorted(keys) and len(set(keys)) == len(keys), f"{state.value} is out of order")
            _require(all(item.state is state and item.key == key for key, item in queue), f"{state.value} is mixed up")
        _require(len(self._waiting) == sum(len(line) for line, _ in lines), "the queue miscounts")
        tenants = Counter(item.request.tenant for item in self._by_id.values())
        _require(self._share.check(tenants), "tenants are miscounted")
        _require(len(running) <= self._most_running, "too many run")
        _require(len(self._by_id) == len(self._waiting) + len(running), "a sequence is lost")
        for sequence in self._by_id.values():
            self._check_sequence(sequence)
        by_request = {item.seq_id for items in self._by_request.values() for item in items}
        _require(by_request == set(self._by_id), "requests and sequences differ")
        _require(not self._held or self._policy.in_batches, "something is held without a batch")

    def _check_sequence(self, sequence: Sequence) -> None:
        size = self._block_size
        _require(0 <= sequence.num_computed < len(sequence.tokens), "computed further than there are tokens")
        _require(sequence.num_generated < max(sequence.request.max_tokens, 1), "generated too much")
        if sequence.scored is not None:
            scored = min(sequence.num_computed, sequence.num_prompt - 1)
            _require(len(sequence.scored) == scored, "scored other rows than were computed")
        if sequence.state is State.WAITING:
            _require(not sequence.block_table and not sequence.num_computed, "a waiting sequence holds something")
            return
        table = len(sequence.block_table)
        _require(sequence.num_computed <= table * size, "computed further than there are blocks")
        _require(table <= self._blocks_for(len(sequence.tokens)), "holds more blocks than it needs")
        _require(sequence.remaining == 1 or table == self._blocks_for(len(sequence.tokens)), "a prefill lacks blocks")
        _require(sequence.num_published * size <= sequence.num_computed, "published more than was computed")

    # Scheduling.

    def _schedule_decodes(self, entries: list[StepEntry], preempted: list[int], budget: int) -> int:
        planned = 0  # the running sequences before this position are in the plan or passed over
        while planned < len(self._running) and budget > 0:
            sequence = self._running[planned][1]
            planned += 1
            if sequence.num_computed != len(sequence.tokens) - 1:
                continue
            if sequence.num_computed == len(sequence.block_table) * self._block_size:
                if not self._make_room(planned, preempted):
                    self._preempt(sequence, preempted)
                    break
                sequence.block_table = (*sequence.block_table, *self._pool.allocate(1))
            entries.append(_entry(sequence, 1))
            budget -= 1
        return budget

    def _make_room(self, planned: int, preempted: list[int]) -> bool:
        """Free at least one block by preempting from the back; False if nobody is left behind ``planned``."""
        while self._pool.num_free == 0:
            if self._held:
                self._release_held()
            elif len(self._running) > planned:
                self._preempt(self._running[-1][1], preempted)
            else:
                return False
        return True

    def _schedule_chunks(self, entries: list[StepEntry], budget: int) -> int:
        for _, sequence in self._running:
            if budget <= 0:
                break
            if sequence.num_computed < len(sequence.tokens) - 1:
                count = self._chunk(sequence, budget)
                if count > 0:
                    entries.append(_entry(sequence, count))
                    budget -= count
        return budget

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """How many rows of a sequence to compute in this step; none if what it has to score must wait."""
        count = min(sequence.remaining, budget)
        if sequence.scored is not None:
            unscored = sequence.num_prompt - 1 - sequence.num_computed
            if min(count, unscored) > self._score_left:
                count = self._score_left
            self._score_left -= min(count, unscored)
        return count

    def _admit(self, entries: list[StepEntry], budget: int) -> None:
        # A static batch is put together at once, whatever its prompts' length; then nobody joins it.
        in_batches = self._policy.in_batches
        if in_batches and self._running:
            return
        while len(self._running) < self._most_running and (budget > 0 or in_batches):
            sequence = self._candidate()
            if sequence is None:
                return
            attempt = (sequence.seq_id, self._room_made)
            if attempt == self._did_not_fit:
                return
            if not self._take_blocks(sequence):
                self._did_not_fit = attempt
                return
            self._waiting.remove(sequence)
            sequence.move_to(State.RUNNING)
            insort(self._running, (sequence.key, sequence))
            count = self._chunk(sequence, budget)
            if count > 0:
                entries.append(_entry(sequence, count))
                budget -= count

    def _candidate(self) -> Sequence | None:
        """Who is to be admitted next; None if nobody can be."""
        if not self._waiting:
            return None
        return next((item for item in self._waiting.in_order() if not self._waits_for_sibling(item)), None)

    def _waits_for_sibling(self, sequence: Sequence) -> bool:
        """Whether the first completion of the request is about to publish the prompt that this one can then share."""
        if sequence.index == 0:
            return False
        first = self._by_request[sequence.request.request_id][0]
        if first.index != 0 or first is sequence:
            return False  # it has ended; whoever comes first computes the prompt
        return first.num_published < (sequence.num_prompt - 1) // self._block_size and first.num_generated == 0

    def _match(self, sequence: Sequence) -> Match:
        """What the cache holds of a waiting sequence; at least one token must be computed to have logits.

        A sequence to be scored needs the logits of all rows.
        """
        usable = sequence.publishes and sequence.scored is None
        limit = (len(sequence.tokens) - 1) // self._block_size if usable else 0
        return self._pool.match(sequence.salt, sequence.tokens, limit)

    def _fits(self, sequence: Sequence, match: Match, more: int = 0) -> bool:
        """Whether a waiting sequence's blocks are there, if ``more`` were free, and the watermark stays."""
        needed = self._blocks_for(len(sequence.tokens)) - len(match.blocks)
        left = self._pool.num_free + more - self._pool.num_idle(match.blocks) - needed
        return left >= (self._spare_blocks if self._running else 0)

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Give a waiting sequence all blocks that its tokens need, cached ones first; False if they are not there."""
        match = self._match(sequence)
        if not self._fits(sequence, match):
            return False
        self._pool.share(match.blocks)
        needed = self._blocks_for(len(sequence.tokens)) - len(match.blocks)
        sequence.block_table = match.blocks + self._pool.allocate(needed)
        sequence.num_computed = len(match.blocks) * self._block_size
        sequence.num_published = len(match.blocks)
        sequence.prefix_id = match.prefix_id
        if not sequence.admitted:
            sequence.admitted = True
            sequence.num_cached = sequence.num_computed
        self._prefix_hit_tokens += sequence.num_computed
        return True

    def _displace(self, preempted: list[int]) -> None:
        """Preempt who runs behind the first in the queue, at a lower priority, until that one has a slot and blocks."""
        candidate = self._candidate()
        if candidate is None:
            return
        attempt = (candidate.seq_id, self._room_made)
        priority = candidate.request.priority
        lower = [item for key, item in self._running if key > candidate.key and item.request.priority < priority]
        if not lower or attempt == self._could_not_displace:
            return
        match = self._match(candidate)
        # Nobody is preempted for nothing: all that could be had must be enough. A block becomes free only if nobody
        # but these holds it.
        held = Counter(block for item in lower for block in item.block_table)
        freed = sum(self._pool.references(block) == count for block, count in held.items())
        if not self._fits(candidate, match, more=freed - sum(block in held for block in match.blocks)):
            self._could_not_displace = attempt
            return
        while lower and (len(self._running) >= self._most_running or not self._fits(candidate, match)):
            self._preempt(lower.pop(), preempted)

    def _preempt(self, sequence: Sequence, preempted: list[int]) -> None:
        self._leave_running(sequence)
        sequence.move_to(State.WAITING)
        sequence.block_table = ()
        sequence.num_computed = sequence.num_published = 0
        sequence.prefix_id = NO_PREFIX
        if sequence.scored is not None:
            sequence.scored = []
        sequence.num_preemptions += 1
        self._waiting.add(sequence)
        preempted.append(sequence.seq_id)
        self._preemptions += 1

    def _leave_running(self, sequence: Sequence) -> None:
        del self._running[bisect_left(self._running, (sequence.key,))]
        self._pool.free(sequence.block_table)
        self._room_made += 1

    def _release_held(self) -> None:
        for sequence in self._held:
            self._pool.free(sequence.block_table)
            sequence.move_to(State.FINISHED)
        self._held.clear()
        self._room_made += 1

    # Committing.

    def _publish(self, sequence: Sequence) -> None:
        size = self._block_size
        if sequence.num_published == 0:
            sequence.prefix_id = self._pool.root(sequence.salt)
        while (sequence.num_published + 1) * size <= sequence.num_computed:
            start = sequence.num_published * size
            block = sequence.block_table[sequence.num_published]
            sequence.prefix_id = self._pool.publish(
                block, sequence.prefix_id, tuple(sequence.tokens[start : start + size])
            )
            sequence.num_published += 1

    def _take_tokens(self, sequence: Sequence, outcome: EntryResult) -> TokenDelta:
        request = sequence.request
        finish = None
        count = len(outcome.token_ids)
        scored = _take_scored(sequence)
        for taken, token in enumerate(outcome.token_ids, start=1):
            generated = sequence.num_generated
            sequence.tokens.append(token)
            stopped = token in request.stop_ids and generated >= request.params.min_tokens
            if stopped or (outcome.ended and taken == count):
                finish = FinishReason.STOP
            elif generated + 1 >= request.max_tokens:
                finish = FinishReason.LENGTH
            if finish is not None:
                return self._end(sequence, finish, outcome.token_ids[:taken], outcome.logprobs[:taken], scored=scored)
        return TokenDelta(
            sequence.seq_id, request.request_id, sequence.index, outcome.token_ids, outcome.logprobs, None, None, scored
        )

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        *,
        error: str | None = None,
        scored: tuple[TokenLogprobs, ...] = (),
    ) -> TokenDelta:
        """Take a waiting or running sequence out of everything."""
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
            sequence.move_to(State.FINISHED)
        elif self._policy.in_batches and len(self._running) > 1:
            del self._running[bisect_left(self._running, (sequence.key,))]
            sequence.move_to(State.HELD)
            self._held.append(sequence)
        else:
            self._leave_running(sequence)
            sequence.move_to(State.FINISHED)
            self._release_held()
        del self._by_id[sequence.seq_id]
        self._share.leave(sequence.request.tenant)
        request_id = sequence.request.request_id
        siblings = self._by_request[request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._by_request[request_id]
        return TokenDelta(sequence.seq_id, request_id, sequence.index, token_ids, logprobs, reason, error, scored)

    # Memory.

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _note_memory(self) -> None:
        used = self._pool.num_blocks - self._pool.num_free
        self._peak_blocks = max(self._peak_blocks, used)
        # Shared blocks are full, so an empty place has one holder: what it lacks to a full table.
        self._places += used * self._block_size
        holding = [*(item for _, item in self._running), *self._held]
        self._empty_places += sum([len(item.block_table) * self._block_size - len(item.tokens) for item in holding])


def _entry(sequence: Sequence, count: int) -> StepEntry:
    start = sequence.num_computed
    tokens = sequence.tokens
    request = sequence.request
    end = start + count
    return StepEntry(
        sequence.seq_id,
        request,
        sequence.index,
        start,
        (tokens[start],) if count == 1 else tuple(tokens[start:end]),
        sequence.block_table,
        end == len(tokens) and request.max_tokens > 0,
        len(tokens) - sequence.num_prompt,
        tuple(tokens) if _needs_history(request.params, count) else (),
        sequence.scored is not None and start < sequence.num_prompt - 1,
    )


def _take_scored(sequence: Sequence) -> tuple[TokenLogprobs, ...]:
    """The prompt's log-probabilities, once."""
    if sequence.scored is None:
        return ()
    scored, sequence.scored = tuple(sequence.scored), None
    return scored


def _needs_history(params: SamplingParams, count: int) -> bool:
    # A constraint is followed token by token; only after a recompute may its follower have lost its place.
    return params.penalized or (params.constraint is not None and count > 1)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InternalError(message)
