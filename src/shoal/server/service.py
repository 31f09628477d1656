"""The model being served, and whether requests can be taken.

The server listens before the model is there, so that whoever watches the process can tell "starting" from "dead":
until ``open`` is called, and again after ``stop_admitting``, requests are answered with 503.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from shoal.engine.backlog import Pace
from shoal.engine.client import AsyncClient
from shoal.engine.engine import EngineStats
from shoal.engine.thread import EngineThread
from shoal.errors import EngineDeadError
from shoal.server.errors import RETRY_SECONDS, SERVER, ApiError
from shoal.server.token_texts import TokenTexts
from shoal.text.chat_template import ChatTemplate
from shoal.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from shoal.assembly import LoadedModel


class Condition(StrEnum):
    """What a service is doing."""

    LOADING = "loading"
    READY = "ready"
    CLOSING = "closing"


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One model with its engine.

    name: the id by which requests ask for it. created: Unix time, of the model's file.
    fingerprint: the same for two servers whose answers to a seeded request are the same.
    """

    name: str
    created: int
    fingerprint: str
    engine: EngineThread
    client: AsyncClient
    tokenizer: Tokenizer
    template: ChatTemplate | None
    policy: str
    context_length: int
    max_num_seqs: int
    token_budget: int
    texts: TokenTexts = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "texts", TokenTexts(self.tokenizer))

    @classmethod
    def of(cls, loaded: LoadedModel, engine: EngineThread, *, name: str, created: int, version: str) -> ServedModel:
        """The served form of a loaded model whose engine runs."""
        config = loaded.config
        # What decides about bits; threads, instruction set and batch do not.
        parts = (version, loaded.path.name, str(created), config.precision, config.kv_dtype)
        return cls(
            name=name,
            created=created,
            fingerprint=f"fp_{hashlib.sha256('/'.join(parts).encode()).hexdigest()[:12]}",
            engine=engine,
            client=AsyncClient(engine),
            tokenizer=loaded.tokenizer,
            template=loaded.chat_template,
            policy=config.policy,
            context_length=loaded.context_length,
            max_num_seqs=config.max_num_seqs,
            token_budget=config.token_budget,
        )

    @property
    def pace(self) -> Pace:
        """How the engine goes. What runs while others wait is all that there is room for."""
        stats = self.engine.stats
        running, waiting = stats.scheduler.running, stats.scheduler.waiting
        return Pace(
            slots=min(running, self.max_num_seqs) if running and waiting else self.max_num_seqs,
            rows=self.token_budget,
            step_seconds=stats.step_seconds,
        )

    def check_name(self, wanted: str | None) -> None:
        """``ApiError`` 404 for another model's name."""
        if wanted is not None and wanted != self.name:
            raise ApiError(
                404,
                f"model: {wanted[:200]!r} is not served here; the model is {self.name!r}",
                param="model",
                code="model_not_found",
            )


class Service:
    """Holds the served model. Used from the event loop only.

    clock: seconds since the epoch, for the time stamps in answers.
    """

    def __init__(self, *, version: str, clock: Callable[[], float]) -> None:
        self.version = version
        self.clock = clock
        self.condition = Condition.LOADING
        self._served: ServedModel | None = None

    def open(self, served: ServedModel) -> None:
        """The model is there: take requests."""
        self._served = served
        self.condition = Condition.READY

    def stop_admitting(self) -> None:
        """Take no new requests; those that run go on."""
        self.condition = Condition.CLOSING

    def give_up(self, reason: str) -> None:
        """The engine is stuck: it counts as dead, and whoever waits for it is told."""
        assert self._served is not None
        error = EngineDeadError(reason)
        self._served.engine.abandon(error)
        self._served.client.fail(error)

    @property
    def in_step(self) -> int | None:
        """The number of the step that the engine is in, if it is."""
        return None if self._served is None else self._served.engine.in_step

    @property
    def alive(self) -> bool:
        """Whether there is nothing wrong with the engine, if there is one."""
        return self._served is None or not self._served.engine.dead

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.condition is Condition.READY and self.alive

    @property
    def served_name(self) -> str | None:
        """The model's id; None while there is no model."""
        return None if self._served is None else self._served.name

    @property
    def stats(self) -> EngineStats | None:
        """The engine's, as of its last step; None while there is no model."""
        return None if self._served is None else self._served.engine.stats

    def model(self) -> ServedModel:
        """The model, or ``ApiError`` 503 while requests are not taken."""
        if self._served is None:
            raise _unavailable("the model is still being loaded")
        if self.condition is Condition.CLOSING:
            raise _unavailable("the server is shutting down")
        return self._served


def _unavailable(message: str) -> ApiError:
    return ApiError(503, message, type=SERVER, code="not_ready", headers={"retry-after": str(RETRY_SECONDS)})
