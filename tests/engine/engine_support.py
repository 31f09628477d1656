"""Engines, requests and outboxes for tests, on the null backend and a vocabulary of bytes.

Every engine made here checks the scheduler's books after each step, and that no block is held once it is idle.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from shoal.backends.null import Fault, NullBackend
from shoal.config import EngineConfig
from shoal.core.params import SamplingParams
from shoal.core.plan import CacheShape, StepEntry, StepPlan, StepResult
from shoal.core.request import FinishReason, Request
from shoal.core.scheduler import Scheduler
from shoal.engine.engine import Engine
from shoal.engine.inbox import Inbox
from shoal.engine.messages import Chunk
from shoal.engine.request import Limits, resolve
from shoal.engine.start import scheduler_config
from shoal.errors import EngineError
from shoal.grammar.vocabulary import Vocabulary
from shoal.metrics.timeline import RequestTimeline
from shoal.text.chat_template import ChatTemplate
from shoal.text.tokenizer import Tokenizer, TokenizerSpec

EOS = 256
VOCAB = 257
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
_ANYTHING = Limits(
    context_length=2**31 - 1,
    vocab_size=VOCAB,
    pool_tokens=2**31 - 1,
    max_waiting=2**31 - 1,
    eos_ids=frozenset({EOS}),
    check_grammar=lambda spec: None,
)
WAIT_S = 60  # only a broken test ever waits so long


@cache
def byte_tokenizer() -> Tokenizer:
    """Token b is byte b; one control token, which ends the text."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return Tokenizer(
        TokenizerSpec(
            model="gpt2",
            pre="default",
            tokens=(*(spelling[byte] for byte in range(256)), "<|end|>"),
            token_types=(1,) * 256 + (3,),
            merges=(),
            scores=(),
            bos_id=None,
            eos_id=EOS,
            end_ids=frozenset({EOS}),
            unknown_id=None,
            add_bos=False,
            add_eos=False,
            add_space_prefix=False,
        )
    )


class WatchedBackend(NullBackend):
    """A null backend whose steps can be held at a gate, or do something on the way."""

    gate: threading.Event | None = None
    on_step: Callable[[int], None] | None = None
    steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        if self.gate is not None:
            assert self.gate.wait(WAIT_S)
        self.steps += 1
        if self.on_step is not None:
            self.on_step(self.steps)
        return super().execute(plan)


class CheckedEngine(Engine):
    """Checks itself after every step."""

    def step(self) -> None:
        super().step()
        self._scheduler.check()
        if not self._live:
            assert not self._scheduler.has_work()
            assert self._scheduler.stats().used_blocks == 0


@dataclass(frozen=True)
class FakeLoaded:
    """What the engine uses of a ``LoadedModel``."""

    name: str
    path: Path
    backend: NullBackend
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    context_length: int
    config: EngineConfig
    decisions: tuple[Any, ...] = ()


def make_loaded(
    *,
    blocks: int = 128,
    context_length: int = 512,
    faults: tuple[Fault, ...] = (),
    script: str | Sequence[int] | None = None,
    template: bool = True,
    gate: threading.Event | None = None,
    on_step: Callable[[int], None] | None = None,
    config: EngineConfig | None = None,
    **options: Any,
) -> Any:
    """A model that types: ``script`` over and over if given, otherwise pseudo-random ASCII."""
    tokens = list(script.encode()) if isinstance(script, str) else script
    config = config or EngineConfig(**options)

    def choose(entry: StepEntry) -> int:
        assert tokens is not None
        return tokens[entry.num_generated % len(tokens)]

    backend = WatchedBackend(
        CacheShape(blocks, config.block_size, 1, 1, 16, "f32"),
        VOCAB,
        context_length,
        choose=None if tokens is None else choose,
        avoid=frozenset(range(128, VOCAB)),
        faults=faults,
        sleep=time.sleep if any(fault.kind == "stall" for fault in faults) else None,
        vocabulary=lambda: Vocabulary(byte_tokenizer().plain_bytes(), byte_tokenizer().encode_fragment),
    )
    backend.gate = gate
    backend.on_step = on_step
    return cast(
        Any,
        FakeLoaded(
            name="fake",
            path=Path("fake.gguf"),
            backend=backend,
            tokenizer=byte_tokenizer(),
            chat_template=ChatTemplate(TEMPLATE) if template else None,
            context_length=context_length,
            config=config,
        ),
    )


def make_engine(**options: Any) -> CheckedEngine:
    """An engine without a thread. Its clock counts 1, 2, 3 ..."""
    loaded = make_loaded(**options)
    ticks = itertools.count(1)
    return CheckedEngine(
        loaded.backend,
        loaded.tokenizer,
        Scheduler(scheduler_config(loaded.config), loaded.backend.cache_shape),
        Inbox(loaded.config.max_waiting),
        lambda: float(next(ticks)),
    )


def make_request(
    name: str, *, prompt: Iterable[int] = (1,), salt: str | None = None, max_tokens: int = 10, **params: Any
) -> Request:
    """A request past the door's checks; greedy unless told otherwise."""
    values = {"temperature": 1.0 if "seed" in params else 0.0, "seed": 0, **params}
    request = resolve(name, prompt, SamplingParams(max_tokens=max_tokens, **values), _ANYTHING, cache_salt=salt)
    assert isinstance(request, Request)
    return request


class Recorder:
    """An outbox that remembers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.calls = 0
        self.chunks: list[Chunk] = []
        self.failures: list[EngineError] = []
        self.errors: dict[str, str | None] = {}
        self.timelines: dict[str, RequestTimeline | None] = defaultdict(lambda: None)

    def deliver(self, chunks: Sequence[Chunk]) -> None:
        with self._changed:
            self.calls += 1
            self.chunks.extend(chunks)
            for chunk in chunks:
                if chunk.error is not None:
                    self.errors[chunk.request_id] = chunk.error
                if chunk.timeline is not None:
                    assert self.timelines[chunk.request_id] is None
                    self.timelines[chunk.request_id] = chunk.timeline
            self._changed.notify_all()

    def fail(self, error: EngineError) -> None:
        with self._changed:
            self.failures.append(error)
            self._changed.notify_all()

    def result(self, name: str, index: int) -> tuple[tuple[int, ...], str, FinishReason | None]:
        """Tokens, text and finish of a completion; checks that nothing came after its end."""
        own = [chunk for chunk in self.chunks if (chunk.request_id, chunk.index) == (name, index)]
        assert all(chunk.finish is None for chunk in own[:-1]), "nothing comes after the end"
        tokens = tuple(token for chunk in own for token in chunk.token_ids)
        return tokens, "".join(chunk.text for chunk in own), own[-1].finish if own else None

    def wait_for(self, name: str) -> None:
        """Until the request's last chunk came."""
        self._wait(lambda: self.timelines[name] is not None)

    def wait_for_failure(self) -> None:
        self._wait(lambda: bool(self.failures))

    def wait_for_call(self) -> None:
        self._wait(lambda: self.calls > 0)

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S)


def run_until_idle(engine: Engine) -> None:
    """Step until there is nothing to do."""
    engine.step()
    for _ in range(100_000):
        if not engine.has_work():
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


def text_of(tokens: Iterable[int]) -> str:
    """The text of byte tokens."""
    return bytes(tokens).decode()
