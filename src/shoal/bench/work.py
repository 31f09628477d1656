"""What an engine benchmark runs: sequences of random tokens with given lengths. Pure: the same seed, the same work."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.errors import ConfigError

LEAST_OUTPUT = 2  # the first token comes with the prompt, so decoding begins with the second
MIXED_REQUESTS = 4  # of a mixed load, per running sequence
# A length of a mixed load is its maximum times a log-normal factor, cut at one: the median is a fifth of the maximum,
# the mean near a quarter, and about one in eighteen reaches the maximum itself.
_TAIL_MEDIAN = 0.2
_TAIL_SIGMA = 1.0


class Item(NamedTuple):
    """One request: its prompt and how many tokens it will generate."""

    prompt_ids: tuple[int, ...]
    output_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What to run, for any batch size.

    prompt_len, output_len: of every sequence; of a mixed load, the most.
    mixed: lengths are drawn with a long tail, and requests queue for the batch's places, so that prompts and decodes
        share steps throughout. Otherwise the whole batch starts at once.
    """

    prompt_len: int
    output_len: int
    mixed: bool = False

    def __post_init__(self) -> None:
        if self.prompt_len < 1:
            raise ConfigError("prompt_len", f"must be at least 1, got {self.prompt_len}")
        if self.output_len < LEAST_OUTPUT:
            raise ConfigError(
                "output_len",
                f"must be at least {LEAST_OUTPUT}: the first token comes with the prompt; got {self.output_len}",
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence possible."""
        return self.prompt_len + self.output_len

    def requests(self, batch: int) -> int:
        """How many requests a batch size has."""
        return MIXED_REQUESTS * batch if self.mixed else batch

    def blocks(self, batch: int, block_size: int) -> int:
        """KV blocks in which the batch runs without a preemption."""
        return batch * -(-self.longest // block_size)


def draw(work: Work, batch: int, vocabulary: Sequence[int], seed: int) -> tuple[Item, ...]:
    """The requests of one round. Every batch size and seed has its own."""
    generator = random.Random(f"{seed}/{batch}")
    items = []
    for _ in range(work.requests(batch)):
        prompt_len, output_len = work.prompt_len, work.output_len
        if work.mixed:
            prompt_len, output_len = _tail(generator, prompt_len), _tail(generator, output_len)
        items.append(Item(tuple(generator.choices(vocabulary, k=prompt_len)), output_len))
    return tuple(items)


def _tail(generator: random.Random, most: int) -> int:
    factor = _TAIL_MEDIAN * math.exp(generator.gauss(0.0, _TAIL_SIGMA))
    return max(1, min(most, round(most * factor)))
