"""A backend without a model: fake tokens at once, real rules. For tests of whatever stands above the backend.

Tokens are a pure function of the seeds, the position and the token before, so a completion is the same alone, in any
batch, in any chunks and after preemption, as it is with a real model.

The backend also distrusts its caller. Instead of keys and values each cache slot holds a fingerprint of all tokens up
to and including its own. Before an entry runs, every slot it would attend to must hold the fingerprint of that
sequence's own past; so a block freed too early, shared wrongly, published before it was computed, or found by a prefix
that is not the same, is an exception in the very step that would have computed nonsense.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import nan
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shoal.core.grammar import GrammarSpec
from shoal.core.plan import CacheShape, EntryResult, StepEntry, StepPlan, StepResult, TokenLogprobs
from shoal.errors import EngineClosedError, KernelError
from shoal.grammar.compiler import GrammarCompiler
from shoal.grammar.states import GrammarStates, StepMasks
from shoal.grammar.vocabulary import LoadVocabulary
from shoal.sampling.reference import allowed

_MASK = (1 << 64) - 1
_EMPTY = 0
_FAKE_LOGPROB_STEP = 0.5
_CLOSING = frozenset(b'"}]')


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something to go wrong, on purpose, whenever a step holds a request's entry.

    request_id, marker: whose entry sets it off: that request's, or any whose prompt holds the marker's token.
    kind: "error" gives the entry an error result; "raise" raises when the entry's turn comes, after the entries
        before it were computed; "raise_step" raises before anything was computed; "nan" gives log-probabilities that
        are no numbers; "stall" makes the step take ``seconds`` longer.
    after: only once so many tokens have been generated for the entry's completion.
    times: how often it happens; None is always.
    """

    request_id: str | None = None
    marker: int | None = None
    kind: Literal["error", "raise", "raise_step", "nan", "stall"]
    after: int = 0
    times: int | None = None
    seconds: float = 0.0
    message: str = "scripted fault"

    def __post_init__(self) -> None:
        if (self.request_id is None) == (self.marker is None):
            raise KernelError("Fault: give request_id or marker")

    def concerns(self, entry: StepEntry) -> bool:
        """Whether the entry sets it off."""
        guilty = entry.request.request_id == self.request_id or self.marker in entry.request.prompt_ids
        return guilty and entry.num_generated >= self.after


class ScriptedFaultError(RuntimeError):
    """Raised by a ``Fault``; deliberately not a ``ShoalError``, as it stands for a bug."""


@dataclass(slots=True)
class _Past:
    """What is known of one sequence: its tokens so far and the fingerprint after each."""

    root: int
    tokens: list[int]
    prints: list[int] = field(default_factory=list)


class NullBackend:
    """Implements ``Backend`` without computing.

    seed: another seed, other texts.
    choose: gives the next token of an entry in place of the built-in choice (to script a text).
    avoid: tokens that the built-in choice never takes in a free text (say, the end of sequence).
    vocabulary: for constraints; without one they are refused.
    faults: see ``Fault``.
    duration: seconds that a step is to take, passed to ``sleep``, as are those of a fault that stalls.
    """

    def __init__(
        self,
        cache_shape: CacheShape,
        vocab_size: int,
        context_length: int,
        *,
        seed: int = 0,
        choose: Callable[[StepEntry], int] | None = None,
        avoid: frozenset[int] = frozenset(),
        vocabulary: LoadVocabulary | None = None,
        faults: tuple[Fault, ...] = (),
        duration: Callable[[StepPlan], float] | None = None,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        takes_time = duration is not None or any(fault.kind == "stall" for fault in faults)
        if takes_time != (sleep is not None):
            raise KernelError("NullBackend: sleep goes with a duration or a fault that stalls")
        if len(avoid) >= vocab_size:
            raise KernelError(f"NullBackend: avoid leaves none of the {vocab_size} tokens")
        self._cache_shape = cache_shape
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._seed = seed
        self._choose = choose
        self._avoid = avoid
        self._faults = faults
        self._fired = [0] * len(faults)
        self._duration = duration
        self._sleep = sleep
        self._slots: NDArray[np.uint64] = np.full(cache_shape.num_tokens, _EMPTY, dtype=np.uint64)
        self._past: dict[int, _Past] = {}
        self._closed = False
        self._grammars = GrammarStates(vocabulary and GrammarCompiler(vocabulary, vocab_size))
        self._vocabulary = vocabulary
        self._closers: NDArray[np.bool_] | None = None

    @property
    def cache_shape(self) -> CacheShape:
        """The shape given."""
        return self._cache_shape

    @property
    def vocab_size(self) -> int:
        """The size given."""
        return self._vocab_size

    @property
    def context_length(self) -> int:
        """The length given."""
        return self._context_length

    def execute(self, plan: StepPlan) -> StepResult:
        """Check the plan, then give each sampling entry its token."""
        if self._closed:
            raise EngineClosedError("the null backend was closed")
        for entry in plan.entries:
            if (fault := self._fires(entry, "stall")) is not None and self._sleep is not None:
                self._sleep(fault.seconds)
            if (fault := self._fires(entry, "raise_step")) is not None:
                raise ScriptedFaultError(f"request {entry.request.request_id}: {fault.message}")
        self._check_plan(plan)
        if self._duration is not None and self._sleep is not None:
            self._sleep(self._duration(plan))
        return StepResult(tuple(self._run(entry) for entry in plan.entries))

    def check_grammar(self, spec: GrammarSpec) -> object:
        """Compile a constraint, or refuse it."""
        return self._grammars.check(spec)

    def forget(self, seq_id: int) -> None:
        """Drop the sequence's past; unknown ids are ignored."""
        self._past.pop(seq_id, None)
        self._grammars.forget(seq_id)

    def close(self) -> None:
        """Refuse further steps."""
        self._closed = True
        self._past.clear()

    def _run(self, entry: StepEntry) -> EntryResult:
        if (fault := self._fires(entry, "raise")) is not None:
            raise ScriptedFaultError(f"request {entry.request.request_id}: {fault.message}")
        if (fault := self._fires(entry, "error")) is not None:
            return EntryResult(error=fault.message)
        past = self._check_past(entry)
        self._compute(entry, past)
        scored = self._scored(entry, past)
        if not entry.samples:
            return EntryResult(prompt_logprobs=scored)
        masks = self._grammars.masks((entry,))
        token = self._next_token(entry, masks)
        if token is None:
            return self._grammars.take(entry, EntryResult(error="no token is possible"), masks)
        end = entry.start + len(entry.token_ids)
        del past.tokens[end:]  # a step run again gives its token again
        past.tokens.append(token)
        wanted = entry.request.params.logprobs
        logprobs = () if wanted is None else (self._logprobs(token, wanted),)
        if self._fires(entry, "nan") is not None:
            logprobs = (TokenLogprobs(nan, ()),)
        result = EntryResult((token,), logprobs, prompt_logprobs=scored)
        return self._grammars.take(entry, result, masks)

    def _fires(self, entry: StepEntry, kind: str) -> Fault | None:
        for number, fault in enumerate(self._faults):
            if (
                fault.kind == kind
                and fault.concerns(entry)
                and (fault.times is None or self._fired[number] < fault.times)
            ):
                self._fired[number] += 1
                return fault
        return None

    # What the caller must get right.

    def _check_plan(self, plan: StepPlan) -> None:
        if plan.num_rows != sum(len(entry.token_ids) for entry in plan.entries):
            raise KernelError(f"step {plan.step_id}: num_rows {plan.num_rows} is not the sum of its entries' rows")
        seen: set[int] = set()
        readers: dict[int, int] = {}
        for entry in plan.entries:
            if entry.seq_id in seen:
                raise _wrong(entry, "stands twice in one plan")
            seen.add(entry.seq_id)
            self._check_entry(entry)
            for block in entry.block_table:
                readers[block] = readers.get(block, 0) + 1
        for entry in plan.entries:
            for block in self._written_blocks(entry):
                if readers[block] > 1:
                    raise _wrong(entry, f"writes into block {block}, which another entry of the step holds too")

    def _check_entry(self, entry: StepEntry) -> None:
        shape, request = self._cache_shape, entry.request
        end = entry.start + len(entry.token_ids)
        if not entry.token_ids:
            raise _wrong(entry, "has no rows")
        if entry.start < 0 or end > self._context_length:
            raise _wrong(entry, f"rows [{entry.start}, {end}) leave the context of {self._context_length} tokens")
        if end > len(entry.block_table) * shape.block_size:
            raise _wrong(
                entry,
                f"rows [{entry.start}, {end}) do not fit {len(entry.block_table)} blocks of {shape.block_size} tokens",
            )
        if len(set(entry.block_table)) != len(entry.block_table):
            raise _wrong(entry, f"holds a block twice: {entry.block_table}")
        for block in entry.block_table:
            if not 0 <= block < shape.num_blocks:
                raise _wrong(entry, f"block {block} is outside the pool of {shape.num_blocks}")
        for token in entry.token_ids:
            if not 0 <= token < self._vocab_size:
                raise _wrong(entry, f"token {token} is outside the vocabulary of {self._vocab_size}")
        if entry.scores and (request.params.prompt_logprobs is None or entry.index != 0 or entry.num_scored < 1):
            raise _wrong(entry, "scores where there is nothing to score")
        if entry.samples != (request.max_tokens > 0 and end == len(request.prompt_ids) + entry.num_generated):
            raise _wrong(
                entry,
                f"{'samples' if entry.samples else 'does not sample'} after {end} tokens, but has "
                f"{len(request.prompt_ids)} prompt and {entry.num_generated} generated ones",
            )

    def _check_past(self, entry: StepEntry) -> _Past:
        """The sequence's past, after making sure that the rows continue it and that the cache holds it."""
        past = self._past.get(entry.seq_id)
        if past is None:
            root = _mix(1, hash(entry.request.cache_salt) & _MASK)
            past = self._past[entry.seq_id] = _Past(root, list(entry.request.prompt_ids))
        end = entry.start + len(entry.token_ids)
        if end > len(past.tokens):
            raise _wrong(entry, f"rows end at {end}, but only {len(past.tokens)} tokens are known")
        for position, token in enumerate(entry.token_ids, entry.start):
            if token != past.tokens[position]:
                raise _wrong(entry, f"position {position} is token {past.tokens[position]}, got {token}")
        for position in range(len(past.prints), end):
            before = past.prints[-1] if position else past.root
            past.prints.append(_mix(before, past.tokens[position]))
        if entry.start:
            held = self._slots[self._slot_indices(entry, 0, entry.start)]
            expected = np.array(past.prints[: entry.start], dtype=np.uint64)
            wrong = np.flatnonzero(held != expected)
            if len(wrong):
                position = int(wrong[0])
                what = "nothing" if held[position] == _EMPTY else "another text's token"
                raise _wrong(entry, f"position {position} counts as computed, but the cache holds {what} there")
        return past

    def _compute(self, entry: StepEntry, past: _Past) -> None:
        end = entry.start + len(entry.token_ids)
        self._slots[self._slot_indices(entry, entry.start, end)] = past.prints[entry.start : end]

    def _slot_indices(self, entry: StepEntry, start: int, end: int) -> NDArray[np.int64]:
        size = self._cache_shape.block_size
        positions = np.arange(start, end)
        return np.array(entry.block_table, dtype=np.int64)[positions // size] * size + positions % size

    def _written_blocks(self, entry: StepEntry) -> tuple[int, ...]:
        size = self._cache_shape.block_size
        end = entry.start + len(entry.token_ids)
        return entry.block_table[entry.start // size : (end - 1) // size + 1]

    # What it gives back.

    def _next_token(self, entry: StepEntry, masks: StepMasks) -> int | None:
        row = masks.rows.get(entry.seq_id)
        chosen = None if self._choose is None else self._choose(entry)
        if row is None and chosen is not None:
            return chosen
        request = entry.request
        stream = self._seed
        if not request.params.greedy:
            stream = _mix(_mix(stream, request.seed & _MASK), entry.index)
        state = _mix(_mix(stream, entry.start + len(entry.token_ids)), entry.token_ids[-1])
        early = entry.num_generated < request.params.min_tokens
        if row is not None:
            return self._constrained(masks.bits[row], chosen, request.stop_ids, state, early=early)
        barred = self._avoid | request.stop_ids if early else self._avoid
        token = state % self._vocab_size
        for _ in range(self._vocab_size):
            if token not in barred:
                return token
            token = (token + 1) % self._vocab_size
        raise _wrong(entry, "min_tokens and avoid leave no token to choose")

    def _constrained(
        self, mask: NDArray[np.uint32], chosen: int | None, stop_ids: frozenset[int], state: int, *, early: bool
    ) -> int | None:
        """One of the allowed tokens, or None; half of the time one that brings the text closer to its end."""
        possible = allowed(mask, self._vocab_size)
        stops = np.zeros(self._vocab_size, np.bool_)
        stops[list(stop_ids)] = True
        if early:
            possible &= ~stops
        if chosen is not None and possible[chosen]:
            return chosen
        ending = possible & (self._closing() | stops)
        ids = np.flatnonzero(ending if state & 1 and ending.any() else possible)
        return int(ids[(state >> 1) % len(ids)]) if len(ids) else None

    def _closing(self) -> NDArray[np.bool_]:
        """Tokens that may close a string, a list or an object."""
        if self._closers is None:
            tokens = () if self._vocabulary is None else self._vocabulary().tokens
            self._closers = np.zeros(self._vocab_size, np.bool_)
            self._closers[[index for index, text in enumerate(tokens) if _CLOSING & set(text)]] = True
        return self._closers

    def _scored(self, entry: StepEntry, past: _Past) -> tuple[TokenLogprobs, ...]:
        """Of each scored row: a number made of everything up to it, and of the token that follows."""
        wanted = entry.request.params.prompt_logprobs or 0
        found = []
        for position in range(entry.start, entry.start + entry.num_scored):
            token = past.tokens[position + 1]
            logprob = -(_mix(past.prints[position], token) % 1024) / 64
            found.append(self._logprobs(token, wanted)._replace(logprob=logprob))
        return tuple(found)

    def _logprobs(self, token: int, wanted: int) -> TokenLogprobs:
        """The chosen token first, then its successors, each less likely by half a unit."""
        alternatives = range(min(wanted, self._vocab_size))
        top = tuple(((token + rank) % self._vocab_size, -_FAKE_LOGPROB_STEP * (rank + 1)) for rank in alternatives)
        return TokenLogprobs(-_FAKE_LOGPROB_STEP, top)


def _mix(state: int, value: int) -> int:
    """A new 64-bit state, never 0, from a state and a value (the finalizer of splitmix64, Steele et al. 2014)."""
    mixed = (state * 0x9E3779B97F4A7C15 + value + 0x632BE59BD9B4E019) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) or 1


def _wrong(entry: StepEntry, message: str) -> KernelError:
    return KernelError(f"sequence {entry.seq_id} of request {entry.request.request_id}: {message}")
