"""API keys: secrets by which clients are told apart, each with a name, a priority and limits.

Only the SHA-256 of a secret is kept. Whether a secret is known is found out by comparing its digest with that of every
key in constant time, so neither how long that takes nor where a difference lies tells anything about the keys.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One client.

    name: stands in logs and metrics. digest: SHA-256 of the secret.
    priority: of its requests that name none. max_priority: the highest they may name; None is ``priority``.
    weight: its share of a busy engine beside other keys of the same priority.
    max_concurrent: most requests at once. tokens_per_minute: of prompts and answers. None is without limit.
    """

    name: str
    digest: bytes
    priority: int = 0
    max_priority: int | None = None
    weight: float = 1.0
    max_concurrent: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        """ConfigError names the field."""
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError("name", f"must be 1 to 64 letters, digits, '.', '_' or '-', got {self.name!r}")
        if not isinstance(self.digest, bytes) or len(self.digest) != hashlib.sha256().digest_size:
            raise ConfigError("sha256", "must be the 64 hexadecimal digits of a SHA-256")
        _integer("priority", self.priority, -_MOST)
        if self.max_priority is not None:
            _integer("max_priority", self.max_priority, self.priority)
        number = isinstance(self.weight, (int, float)) and not isinstance(self.weight, bool)
        if not number or not 0.001 <= self.weight <= 1000 or math.isnan(self.weight):
            raise ConfigError("weight", f"must be in [0.001, 1000], got {self.weight!r}")
        for field in ("max_concurrent", "tokens_per_minute"):
            if getattr(self, field) is not None:
                _integer(field, getattr(self, field), 1)

    @property
    def highest(self) -> int:
        """The highest priority that its requests may name."""
        return self.priority if self.max_priority is None else self.max_priority


def digest_of(secret: str) -> bytes:
    """What is kept of a secret; ConfigError for one that no header can carry."""
    if not isinstance(secret, str) or not re.fullmatch(r"[!-~]{1,512}", secret):
        raise ConfigError("secret", "must be 1 to 512 visible ASCII characters without spaces")
    return hashlib.sha256(secret.encode()).digest()


def find(keys: Iterable[ApiKey], secret: bytes) -> ApiKey | None:
    """The key with this secret. Looks at all of them, in constant time each."""
    digest = hashlib.sha256(secret).digest()
    found = None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    return found


def _integer(field: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _MOST:
        raise ConfigError(field, f"must be an integer in [{low}, {_MOST}], got {value!r}")
