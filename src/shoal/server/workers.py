"""Threads for what would hold up the event loop: long prompts, grammars to compile, texts to tokenize.

Few, because each takes a core from the engine while it works; and apart, because whoever has a book tokenized should
keep nobody from being answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class Workers:
    """Two threads that prepare requests, one that serves ``/tokenize`` and ``/detokenize``. Made when first needed."""

    def __init__(self) -> None:
        self._preparing = ThreadPoolExecutor(2, thread_name_prefix="shoal-prepare")
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="shoal-read")

    async def prepare(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """The function's result."""
        return await asyncio.get_running_loop().run_in_executor(self._preparing, function, *arguments)

    async def read(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """The function's result."""
        return await asyncio.get_running_loop().run_in_executor(self._reading, function, *arguments)
