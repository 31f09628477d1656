"""A client as the server knows it: what its key allows, what it has running, what it has used.

Without keys there is one caller for everybody, with no limits. Used from the event loop only, but for the questions
about a request's terms, which are pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from shoal.engine.client import Stream
from shoal.errors import InvalidRequestError
from shoal.server.access.api_key import ApiKey, find
from shoal.server.access.token_bucket import TokenBucket
from shoal.server.errors import RATE_LIMIT, RETRY_SECONDS, ApiError, retry_after


class Caller:
    """key: None for everybody. alone: whether there is no other. own_cache: cached prefixes are its own."""

    def __init__(self, key: ApiKey | None, clock: Callable[[], float], *, alone: bool, own_cache: bool) -> None:
        self.name = None if key is None else key.name
        # One caller alone has nobody to share with; the scheduler need not count.
        self.tenant = "" if key is None or alone else key.name
        self.weight = 1.0 if key is None else key.weight
        self._key = key
        self._clock = clock
        self._own_cache = own_cache
        self._running: set[Lease] = set()
        limit = None if key is None else key.tokens_per_minute
        self._bucket = None if limit is None else TokenBucket(limit, clock())

    # A request's terms.

    def priority(self, wanted: int | None) -> int:
        """A request's; ``InvalidRequestError`` for more than the key may ask for."""
        if self._key is None:
            return wanted or 0
        if wanted is None:
            return self._key.priority
        if wanted > self._key.highest:
            raise InvalidRequestError(
                "priority", f"{wanted} is above {self._key.highest}, the highest that this API key may ask for"
            )
        return wanted

    def cache_salt(self, wanted: str | None) -> str | None:
        """A request's, such that no other caller can have the same."""
        return f"{self.name}\n{wanted or ''}" if self._own_cache else wanted

    # Limits.

    def enter(self, lease: Lease) -> None:
        """A generating request begins; ``ApiError`` 429 if it is one too many or there are no tokens left."""
        key = self._key
        if key is None:
            return
        if key.max_concurrent is not None and len(self._running) >= key.max_concurrent:
            message = f"this API key has {key.max_concurrent} requests running, which is its limit; retry later"
            raise ApiError(
                429, message, type=RATE_LIMIT, code="too_many_concurrent_requests", headers=retry_after(RETRY_SECONDS)
            )
        if self._bucket is not None:
            self.settle()
            wait = self._bucket.wait(self._clock())
            if wait > 0:
                raise ApiError(
                    429,
                    f"this API key has used its {key.tokens_per_minute} tokens a minute; retry in {math.ceil(wait)} s",
                    type=RATE_LIMIT,
                    code="tokens_per_minute_exceeded",
                    headers=retry_after(wait),
                )
        self._running.add(lease)

    def leave(self, lease: Lease) -> None:
        """It has ended, whichever way."""
        if lease in self._running:
            self._take(lease)
            self._running.discard(lease)

    def settle(self) -> None:
        """Count the tokens that have come since."""
        for lease in self._running:
            self._take(lease)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What an answer tells of the limit on tokens, by OpenAI's names."""
        if self._bucket is None:
            return []
        self.settle()
        now = self._clock()
        return [
            (b"x-ratelimit-limit-tokens", b"%d" % self._bucket.per_minute),
            (b"x-ratelimit-remaining-tokens", b"%d" % self._bucket.left(now)),
            (b"x-ratelimit-reset-tokens", b"%.3fs" % self._bucket.until_full(now)),
        ]

    def _take(self, lease: Lease) -> None:
        if self._bucket is not None:
            self._bucket.take(lease.uncounted(), self._clock())


class Lease:
    """One HTTP request of a caller's; ``end`` when it is over, in any case."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self._stream: Stream | None = None
        self._counted = 0

    def begin(self) -> None:
        """It wants to generate: see ``Caller.enter``."""
        self.caller.enter(self)

    def use(self, stream: Stream) -> None:
        """Its tokens come by this stream."""
        self._stream = stream

    def uncounted(self) -> int:
        """Tokens of prompts and answers since this was asked last."""
        if self._stream is None:
            return 0
        used = self._stream.produced + sum(len(request.prompt_ids) for request in self._stream.requests)
        fresh, self._counted = used - self._counted, used
        return fresh

    def end(self) -> None:
        """Free its place."""
        self.caller.leave(self)


class Callers:
    """All there are. share_cache: they may find each other's cached prefixes."""

    def __init__(self, keys: Iterable[ApiKey], clock: Callable[[], float], *, share_cache: bool) -> None:
        self._keys = tuple(keys)
        alone = len(self._keys) < 2
        own_cache = not alone and not share_cache
        self._by_name = {key.name: Caller(key, clock, alone=alone, own_cache=own_cache) for key in self._keys}
        self._everybody = Caller(None, clock, alone=True, own_cache=False)

    @property
    def known(self) -> bool:
        """Whether there are keys."""
        return bool(self._keys)

    @property
    def everybody(self) -> Caller:
        """Who did not have to say who it is."""
        return self._everybody

    def find(self, secret: bytes) -> Caller | None:
        """The caller with this secret."""
        key = find(self._keys, secret)
        return None if key is None else self._by_name[key.name]
