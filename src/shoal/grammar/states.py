"""Where each sequence stands in its grammar, and which tokens that allows in this step.

A matcher has consumed exactly the tokens that its sequence has generated. It takes a token when the token is chosen, so
that a text which can only end is known to end in that very step; if the step is run again, or another backend's tokens
come back after a preemption, the matcher is rebuilt from the tokens. A token thus depends on its own sequence only.

Masks of a batch are filled between two forward passes, when the threads that compute are idle. A stop
token is allowed exactly where the grammar's text may end, and is not part of that text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from shoal.core.grammar import GrammarSpec
from shoal.core.plan import EntryResult, StepEntry
from shoal.errors import InvalidRequestError
from shoal.grammar.compiler import GrammarCompiler

NOTHING_ALLOWED = "the grammar allows none of the model's tokens after this text"


@dataclass(frozen=True, slots=True)
class StepMasks:
    """bits: [rows, words], a set bit allows a token. rows: which row is whose, by sequence id."""

    bits: NDArray[np.uint32]
    rows: Mapping[int, int]


NO_MASKS = StepMasks(np.zeros((0, 0), np.uint32), {})


class _State:
    """One sequence. ``failure`` is why it cannot go on."""

    __slots__ = ("failure", "matcher", "tokens")

    def __init__(self) -> None:
        self.matcher: LLMatcher | None = None
        self.tokens: list[int] = []
        self.failure: str | None = None


class GrammarStates:
    """Owned by a backend and used from its thread; only ``check`` may be called from any.

    compiler: None for a backend without a vocabulary, which refuses every constraint.
    threads: how many may fill masks at once, from four on: with two, which may be one core, handing the work out takes
        as long as doing it.
    """

    def __init__(self, compiler: GrammarCompiler | None, *, threads: int = 1) -> None:
        self._compiler = compiler
        self._executor = LLExecutor(threads) if compiler is not None and threads > 3 else None
        self._states: dict[int, _State] = {}

    def __len__(self) -> int:
        """How many sequences are remembered."""
        return len(self._states)

    def check(self, spec: GrammarSpec) -> object:
        """InvalidRequestError for a constraint that cannot be honoured.

        The constraint stays compiled as long as what comes back is held.
        """
        if self._compiler is None:
            raise InvalidRequestError(spec.field, "this backend has no vocabulary, so it cannot constrain texts")
        return self._compiler.start(spec)

    def forget(self, seq_id: int) -> None:
        """Drop a sequence; unknown ids are ignored."""
        self._states.pop(seq_id, None)

    def masks(self, entries: Iterable[StepEntry]) -> StepMasks:
        """What each sampling entry with a constraint may choose from. One that cannot go on may choose nothing."""
        constrained = [entry for entry in entries if entry.samples and entry.request.params.constraint is not None]
        if not constrained or self._compiler is None:
            return NO_MASKS
        bits = np.zeros((len(constrained), self._compiler.mask_words), np.int32)
        matchers: list[tuple[LLMatcher, int]] = []
        for row, entry in enumerate(constrained):
            state = self._align(entry, self._compiler)
            if state.matcher is not None and state.failure is None:
                matchers.append((state.matcher, row))
        if self._executor is not None and len(matchers) > 1:
            fill_next_token_bitmask_par(self._executor, matchers, bits)
        else:
            for matcher, row in matchers:
                fill_next_token_bitmask(matcher, bits, row)
        masks = bits.view(np.uint32)
        masks &= self._compiler.usable()
        end_id = self._compiler.end_id
        for row, entry in enumerate(constrained):
            state = self._states[entry.seq_id]
            if state.matcher is not None and state.matcher.is_error():
                state.failure = f"the grammar is too complex at this point: {state.matcher.get_error()}"
                masks[row] = 0
                continue
            _allow(masks[row], entry.request.stop_ids, bool(masks[row, end_id // 32] >> (end_id % 32) & 1))
        return StepMasks(masks, {entry.seq_id: row for row, entry in enumerate(constrained)})

    def take_all(
        self, entries: Sequence[StepEntry], results: Sequence[EntryResult], masks: StepMasks
    ) -> tuple[EntryResult, ...]:
        """``take`` for a step's entries."""
        if not masks.rows:
            return tuple(results)
        return tuple(self.take(entry, result, masks) for entry, result in zip(entries, results, strict=True))

    def take(self, entry: StepEntry, result: EntryResult, masks: StepMasks) -> EntryResult:
        """Follow the chosen token; what the step gave, with the reason of a failure and whether the text ends here."""
        state = self._states.get(entry.seq_id)
        row = masks.rows.get(entry.seq_id)
        if state is None or row is None:
            return result
        if result.error is not None:
            if state.failure is not None:
                return EntryResult(error=state.failure)
            return result if masks.bits[row].any() else EntryResult(error=NOTHING_ALLOWED)
        for token in result.token_ids:
            if token in entry.request.stop_ids:
                break
            state.tokens.append(token)
            if state.matcher is None or not state.matcher.consume_token(token):
                state.failure = f"the grammar does not take token {token}, which its mask allowed"
                return EntryResult(error=state.failure)
            if state.matcher.is_stopped():
                return result._replace(ended=True)
        return result

    def _align(self, entry: StepEntry, compiler: GrammarCompiler) -> _State:
        """The entry's state, its matcher behind exactly the tokens generated so far."""
        state = self._states.get(entry.seq_id)
        if state is None:
            state = self._states[entry.seq_id] = _State()
        count, last = entry.num_generated, entry.token_ids[-1]
        known = state.tokens
        if state.matcher is not None and len(known) == count and (count == 0 or known[-1] == last):
            return state
        if entry.history:
            tokens = list(entry.history[len(entry.request.prompt_ids) :])
        elif count == 0 or len(known) >= count - 1:
            tokens = [*known[: count - 1], last] if count else []
        else:
            state.failure = "the constrained text was lost"
            return state
        state.failure = None
        state.tokens = tokens
        if (constraint := entry.request.params.constraint) is not None:
            state.matcher = compiler.matcher(constraint)
        if state.matcher is None or not state.matcher.consume_tokens(tokens):
            state.failure = "the text so far does not fit its grammar"
        return state


def _allow(mask: NDArray[np.uint32], stop_ids: Iterable[int], may_end: bool) -> None:
    for token in stop_ids:
        bit = np.uint32(1 << (token % 32))
        if may_end:
            mask[token // 32] |= bit
        else:
            mask[token // 32] &= ~bit
