"""Exact by construction, shown: the same requests in many circumstances must give the same tokens and bits.

One baseline runs every request alone: batch of one, no prefix cache, plenty of memory. Each variant then changes a
circumstance. A comparison is one completion of one variant against the baseline's: its tokens, and its
log-probabilities as they are, without a tolerance. A variant also counts whether its circumstance came about (a batch
formed, a sequence was preempted, a prefix was found), because a check that never met its case proves nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shoal.backends.base import Backend
from shoal.config import EngineConfig
from shoal.core.params import SamplingParams
from shoal.core.plan import TokenLogprobs
from shoal.core.request import Request
from shoal.core.scheduler import Scheduler, SchedulerConfig
from shoal.errors import ConfigError

MakeBackend = Callable[[EngineConfig], Backend]
SHARED_PREFIX = 48
LONGEST_PROMPT = 160
MOST_NEW_TOKENS = 20


class Outcome(NamedTuple):
    """What one completion gave."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    ending: str


@dataclass(frozen=True, slots=True)
class Variant:
    """One circumstance: the configuration to run under, and what must have happened for it to count.

    rounds: how often all requests are run on the same scheduler; the last round is compared.
    needs: a number of VariantResult that must not be zero (mean_batch: above 1.5).
    others: configurations to try in turn as long as it is.
    """

    name: str
    config: EngineConfig
    rounds: int = 1
    needs: str = ""
    others: tuple[EngineConfig, ...] = ()


@dataclass(frozen=True, slots=True)
class VariantResult:
    """How a variant compared with the baseline."""

    name: str
    comparisons: int
    mismatches: int
    steps: int
    mean_batch: float
    preemptions: int
    prefix_hit_tokens: int
    exercised: bool


@dataclass(frozen=True, slots=True)
class Report:
    """All variants. ``ok`` when nothing differed and every circumstance came about."""

    requests: int
    variants: tuple[VariantResult, ...]

    @property
    def comparisons(self) -> int:
        """Completions compared."""
        return sum(item.comparisons for item in self.variants)

    @property
    def mismatches(self) -> int:
        """Completions that differed."""
        return sum(item.mismatches for item in self.variants)

    @property
    def ok(self) -> bool:
        """Whether exactness was shown."""
        return self.mismatches == 0 and all(item.exercised for item in self.variants)


def make_requests(count: int, *, vocab_size: int, context_length: int, seed: int = 0) -> tuple[Request, ...]:
    """Requests of mixed lengths and parameters over random token ids; every third shares a prefix with others, and
    every fifth has its prompt scored.

    They need not make sense: exactness is about arithmetic, and random ids reach more of it than prose does.
    """
    if context_length < SHARED_PREFIX + 2:
        raise ConfigError("context_length", f"verification needs at least {SHARED_PREFIX + 2} tokens")
    generator = random.Random(seed)
    shared = [generator.randrange(vocab_size) for _ in range(SHARED_PREFIX)]
    requests = []
    for number in range(count):
        new_tokens = generator.randint(1, MOST_NEW_TOKENS)
        longest = max(1, min(LONGEST_PROMPT, context_length - MOST_NEW_TOKENS))
        own = [generator.randrange(vocab_size) for _ in range(generator.randint(1, longest))]
        prompt = (shared + own)[: context_length - new_tokens] if number % 3 == 0 else own
        params = SamplingParams(logprobs=generator.choice((0, 3)), max_tokens=new_tokens, **_style(number))
        if number % 5 == 1:
            params = params.with_changes(prompt_logprobs=2)
        requests.append(
            Request(
                request_id=f"verify-{number}",
                prompt_ids=tuple(prompt),
                params=params,
                max_tokens=new_tokens,
                stop_ids=frozenset({generator.randrange(vocab_size)}),
                seed=generator.getrandbits(64),
            )
        )
    return tuple(requests)


def _style(number: int) -> dict[str, Any]:
    """Half greedy, the rest one of every way to sample."""
    styles: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 1.5, "top_k": 40, "frequency_penalty": 0.5},
        {"temperature": 0.0},
        {"temperature": 0.7, "min_p": 0.05, "n": 2},
    )
    return styles[number % len(styles)]


def make_variants(base: EngineConfig, requests: Sequence[Request]) -> tuple[Variant, ...]:
    """The circumstances, for a resolved configuration."""
    block = base.block_size
    together = replace(
        base,
        max_num_seqs=len(requests) + 16,
        token_budget=512,
        prefix_caching=False,
        policy="fcfs",
        kv_tokens=sum(_blocks(_most_tokens(request), block) * request.params.n for request in requests),
    )
    # Room for the largest request and some more. Whether a pool makes sequences give way depends on when they end, so
    # several are tried, beginning with one that holds a handful of sequences.
    largest = max(_most_tokens(request) for request in requests)
    pools = [_blocks(quarters * largest // 4, block) for quarters in (12, 8, 6, 5, 7, 9, 10, 11, 4)]
    threads = 2 if base.threads == 1 else 1
    return (
        Variant("batched", together, needs="mean_batch"),
        Variant("token budget 16", replace(together, token_budget=16, max_num_seqs=16)),
        Variant("token budget 64", replace(together, token_budget=64, max_num_seqs=64)),
        Variant(
            "small KV pool",
            replace(together, kv_tokens=pools[0]),
            needs="preemptions",
            others=tuple(replace(together, kv_tokens=size) for size in pools[1:]),
        ),
        Variant("cold prefix cache", replace(together, prefix_caching=True)),
        Variant("warm prefix cache", replace(together, prefix_caching=True), rounds=2, needs="prefix_hit_tokens"),
        Variant(f"{threads} thread{'s' * (threads > 1)}", replace(together, threads=threads)),
        Variant("static batching", replace(together, policy="static", max_num_seqs=8)),
    )


def verify(
    make_backend: MakeBackend,
    base: EngineConfig,
    requests: Sequence[Request],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Run the baseline and every variant. ``progress`` gets (runs done, runs in all)."""
    variants = make_variants(base, requests)
    total = len(requests) + len(variants)
    alone = replace(variants[0].config, max_num_seqs=max(request.params.n for request in requests))
    baseline: dict[tuple[str, int], Outcome] = {}
    backend = make_backend(alone)
    try:
        for done, request in enumerate(requests):
            # A fresh scheduler each time: nothing of one request may reach the next.
            scheduler = _scheduler(alone, backend, (request,))
            baseline.update(_run(backend, scheduler, (request,)).outcomes)
            progress(done + 1, total)
    finally:
        backend.close()
    results = []
    for done, variant in enumerate(variants):
        results.append(_compare(make_backend, variant, requests, baseline))
        progress(len(requests) + done + 1, total)
    return Report(len(requests), tuple(results))


class _Run(NamedTuple):
    outcomes: dict[tuple[str, int], Outcome]
    steps: int
    entries: int


def _compare(
    make_backend: MakeBackend,
    variant: Variant,
    requests: Sequence[Request],
    baseline: dict[tuple[str, int], Outcome],
) -> VariantResult:
    """The variant in its first configuration that brings its circumstance about, else in its last."""
    result = _compare_under(make_backend, variant, variant.config, requests, baseline)
    for config in variant.others:
        if result.exercised or result.mismatches:
            break
        result = _compare_under(make_backend, variant, config, requests, baseline)
    return result


def _compare_under(
    make_backend: MakeBackend,
    variant: Variant,
    config: EngineConfig,
    requests: Sequence[Request],
    baseline: dict[tuple[str, int], Outcome],
) -> VariantResult:
    backend = make_backend(config)
    try:
        scheduler = _scheduler(config, backend, requests)
        for _ in range(variant.rounds):
            run = _run(backend, scheduler, requests)
    finally:
        backend.close()
    stats = scheduler.stats()
    facts = {
        "mean_batch": run.entries / run.steps > 1.5,
        "preemptions": stats.preemptions > 0,
        "prefix_hit_tokens": stats.prefix_hit_tokens > 0,
        "": True,
    }
    return VariantResult(
        name=variant.name,
        comparisons=len(baseline),
        mismatches=sum(run.outcomes.get(key) != outcome for key, outcome in baseline.items()),
        steps=run.steps,
        mean_batch=run.entries / run.steps,
        preemptions=stats.preemptions,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        exercised=facts[variant.needs],
    )


def _scheduler(config: EngineConfig, backend: Backend, requests: Sequence[Request]) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            token_budget=config.token_budget,
            max_waiting=sum(request.params.n for request in requests),
            policy=config.policy,
            prefix_caching=config.prefix_caching,
        ),
        backend.cache_shape,
    )


def _run(backend: Backend, scheduler: Scheduler, requests: Sequence[Request]) -> _Run:
    tokens: dict[tuple[str, int], list[int]] = {}
    logprobs: dict[tuple[str, int], list[TokenLogprobs]] = {}
    prompts: dict[tuple[str, int], list[TokenLogprobs]] = {}
    endings: dict[tuple[str, int], str] = {}
    for request in requests:
        scheduler.add(request, 0.0)
    steps = entries = 0
    while scheduler.has_work():
        plan = scheduler.schedule(float(steps))
        result = backend.execute(plan)
        steps += 1
        entries += len(plan.entries)
        for delta in scheduler.commit(plan, result):
            key = (delta.request_id, delta.index)
            tokens.setdefault(key, []).extend(delta.token_ids)
            logprobs.setdefault(key, []).extend(delta.logprobs)
            prompts.setdefault(key, []).extend(delta.prompt_logprobs)
            if delta.finish is not None:
                endings[key] = delta.error or delta.finish.value
                backend.forget(delta.seq_id)
    outcomes = {
        key: Outcome(tuple(tokens.get(key, ())), tuple(logprobs.get(key, ())), tuple(prompts.get(key, ())), ending)
        for key, ending in endings.items()
    }
    return _Run(outcomes, steps, entries)


def _most_tokens(request: Request) -> int:
    return len(request.prompt_ids) + request.max_tokens


def _blocks(tokens: int, block_size: int) -> int:
    """Tokens in whole blocks."""
    return -(-tokens // block_size) * block_size
