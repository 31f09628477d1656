"""A broken invariant of the core: always a bug in Shoal, never a user's fault."""

from __future__ import annotations


class InternalError(RuntimeError):
    """The scheduler's or the block pool's own bookkeeping contradicts itself."""
