"""Putting an engine together over a loaded model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.config import EngineConfig
from shoal.core.scheduler import Scheduler, SchedulerConfig
from shoal.engine.engine import Engine
from shoal.engine.inbox import Inbox
from shoal.engine.thread import EngineThread

if TYPE_CHECKING:
    from shoal.assembly import LoadedModel


def start_engine(loaded: LoadedModel, clock: Callable[[], float] = time.monotonic) -> EngineThread:
    """Scheduler, inbox, engine and its running thread; closing the thread closes the model's backend."""
    config = loaded.config
    scheduler = Scheduler(scheduler_config(config), loaded.backend.cache_shape)
    return EngineThread(Engine(loaded.backend, loaded.tokenizer, scheduler, Inbox(config.max_waiting), clock))


def scheduler_config(config: EngineConfig) -> SchedulerConfig:
    """The part of the options that scheduling needs."""
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        token_budget=config.token_budget,
        # The inbox keeps the limit, by what it last heard: meanwhile a preemption may have made the queue longer, and
        # what was taken in is not to be refused any more.
        max_waiting=None,
        policy=config.policy,
        priority_ageing=config.priority_ageing or None,
        prefix_caching=config.prefix_caching,
    )
