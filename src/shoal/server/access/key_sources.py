"""Where API keys come from: a TOML file, or a line of text such as an environment variable holds.

The file is a list of tables named ``key``::

    [[key]]
    name = "nightly"
    sha256 = "9f86d081..."     # or secret = "..."
    priority = -1
    max_concurrent = 8
    tokens_per_minute = 200000
    weight = 0.5

The line is ``name:secret,name:secret``; a secret without a name is called ``key-1`` and so on by its place.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.server.access.api_key import ApiKey, digest_of

_FIELDS = tuple(item.name for item in fields(ApiKey) if item.name != "digest")
_KNOWN = ("name", "secret", "sha256", *_FIELDS[1:])


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file; ConfigError for the option ``api_keys`` says which table and field is wrong."""
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError("api_keys", f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("api_keys", f"{path} is not TOML: {error}") from None
    listed = tables.pop("key", None)
    if tables or not isinstance(listed, list) or not listed or not all(isinstance(item, dict) for item in listed):
        raise ConfigError("api_keys", f"{path} must hold tables [[key]], at least one, and nothing else")
    found = []
    for number, table in enumerate(listed, 1):
        try:
            found.append(_key(table))
        except ConfigError as error:
            raise ConfigError("api_keys", f"{path}, [[key]] number {number}, {error.field}: {error.message}") from None
    return distinct(found)


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """The keys of a line; ConfigError for the option ``api_keys``, which does not repeat a secret."""
    found = []
    for number, item in enumerate(filter(None, (part.strip() for part in text.split(","))), 1):
        name, colon, secret = item.partition(":")
        name, secret = (name, secret) if colon else (f"key-{number}", item)
        try:
            found.append(ApiKey(name=name, digest=digest_of(secret)))
        except ConfigError as error:
            told = "must be 1 to 64 letters, digits, '.', '_' or '-'" if error.field == "name" else error.message
            raise ConfigError("api_keys", f"SHOAL_API_KEYS, item {number}, {error.field}: {told}") from None
    return distinct(found)


def distinct(keys: Iterable[ApiKey]) -> tuple[ApiKey, ...]:
    """The keys, if no two have the same name or secret."""
    names: set[str] = set()
    digests: dict[bytes, str] = {}
    found = tuple(keys)
    for key in found:
        if key.name in names:
            raise ConfigError("api_keys", f"two keys have the name {key.name!r}")
        if key.digest in digests:
            raise ConfigError("api_keys", f"the keys {digests[key.digest]!r} and {key.name!r} have the same secret")
        names.add(key.name)
        digests[key.digest] = key.name
    return found


def _key(table: dict[str, Any]) -> ApiKey:
    for name in table:
        if name not in _KNOWN:
            raise ConfigError(name[:64], f"unknown; known are {', '.join(_KNOWN)}")
    if "name" not in table:
        raise ConfigError("name", "is missing")
    if ("secret" in table) == ("sha256" in table):
        raise ConfigError("secret", "give either secret or sha256")
    values = {name: table[name] for name in _FIELDS if name in table}
    if "secret" in table:
        return ApiKey(digest=digest_of(table["secret"]), **values)
    try:
        digest = bytes.fromhex(table["sha256"])
    except (TypeError, ValueError):
        digest = b""  # refused below
    return ApiKey(digest=digest, **values)
