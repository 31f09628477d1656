"""KV blocks: who holds them, which may be taken next, and which hold a prefix that may be found again.

A block is in one of three places: held (reference count above zero), free and blank, or free and cached (published:
its content is a known prefix). Blank blocks are taken first, then cached ones in the order in which they became free,
so that what was used last is found longest. A sequence gives its blocks back tail first: a prefix outlives what
followed it.

The prefix index is exact: its key is (id of the prefix before, tuple of this block's tokens) and its ids come from a
counter. There are no hashes of content, so there are no collisions, and the same calls give the same ids. A salt is
another root, so prefixes of different salts never meet.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from shoal.core.errors import InternalError

NO_PREFIX = -1


class Match(NamedTuple):
    """Cached blocks of a prompt's beginning, in order, and the id of the prefix that they end with."""

    blocks: tuple[int, ...]
    prefix_id: int


class _Published(NamedTuple):
    key: tuple[int, tuple[int, ...]]
    prefix_id: int


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens; every operation is O(blocks touched)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        # A dictionary keeps its insertion order, and taking a block out of the middle is O(1).
        self._cached: dict[int, None] = {}
        self._published: dict[int, _Published] = {}
        self._index: dict[tuple[int, tuple[int, ...]], int] = {}
        self._roots: dict[Hashable, int] = {}
        self._root_salts: dict[int, Hashable] = {}
        self._root_children: dict[int, int] = {}
        self._next_id = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds but whose prefix may be found."""
        return len(self._cached)

    def match(self, salt: Hashable, tokens: Sequence[int], limit: int) -> Match:
        """The longest run of at most ``limit`` published blocks that ``tokens`` begins with. Changes nothing."""
        prefix = self._roots.get(salt, NO_PREFIX)
        blocks: list[int] = []
        size = self.block_size
        while prefix != NO_PREFIX and len(blocks) < limit:
            start = len(blocks) * size
            block = self._index.get((prefix, tuple(tokens[start : start + size])))
            if block is None:
                break
            blocks.append(block)
            prefix = self._published[block].prefix_id
        return Match(tuple(blocks), prefix)

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of ``blocks`` nobody holds, so that sharing them makes as many fewer free."""
        return sum(self._references[block] == 0 for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each of some published blocks."""
        for block in blocks:
            if block not in self._published:
                raise InternalError(f"block {block} is shared but not published")
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take free blocks; what a cached one held is forgotten. The caller has looked at ``num_free``."""
        if count > self.num_free:
            raise InternalError(f"{count} blocks wanted, {self.num_free} are free")
        taken = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block = next(iter(self._cached))
                del self._cached[block]
                self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return tuple(taken)

    def free(self, blocks: Sequence[int]) -> None:
        """One holder less for each block of a table, the last block first."""
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise InternalError(f"block {block} is freed but nobody holds it")
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._published:
                    self._cached[block] = None
                else:
                    self._blank.append(block)

    def root(self, salt: Hashable) -> int:
        """The id of the empty prefix under a salt, for publishing a first block right away."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = self._new_id()
            self._root_salts[root] = salt
            self._root_children[root] = 0
        return root

    def publish(self, block: int, parent: int, tokens: tuple[int, ...]) -> int:
        """Make a full, computed, held block findable behind the prefix ``parent``; the id of the prefix it ends.

        If an equal prefix is there already, that one stays and its id is given; the block remains private.
        """
        key = (parent, tokens)
        known = self._index.get(key)
        if known is not None:
            return self._published[known].prefix_id
        if self._references[block] <= 0 or block in self._published or len(tokens) != self.block_size:
            raise InternalError(f"block {block} cannot be published")
        prefix = self._new_id()
        self._index[key] = block
        self._published[block] = _Published(key, prefix)
        if parent in self._root_children:
            self._root_children[parent] += 1
        return prefix

    def check(self) -> None:
        """InternalError unless every invariant holds."""
        for block, references in enumerate(self._references):
            places = (references > 0) + (block in self._cached) + (self._blank.count(block))
            _require(references >= 0 and places == 1, f"block {block} is in {places} places")
        _require(len(self._index) == len(self._published), "the index and the published blocks differ in number")
        for block, (key, _) in self._published.items():
            _require(self._index.get(key) == block, f"block {block} is published under a key that is not its own")
        _require(all(block in self._published for block in self._cached), "a cached block is not published")
        _require(not any(block in self._published for block in self._blank), "a blank block is published")
        counts = dict.fromkeys(self._root_children, 0)
        for key in self._index:
            if key[0] in counts:
                counts[key[0]] += 1
        _require(counts == self._root_children, "a root's children are miscounted")
        _require({self._roots[salt] for salt in self._roots} == set(counts), "roots and their counts differ")

    def check_all_free(self) -> None:
        """InternalError unless nobody holds a block."""
        _require(self.num_free == self.num_blocks, f"{self.num_blocks - self.num_free} blocks are still held")

    def references(self, block: int) -> int:
        """How many hold the block."""
        return self._references[block]

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _forget(self, block: int) -> None:
        """Take a block out of the index. What followed it can no longer be reached, and goes when its turn comes."""
        key, _ = self._published.pop(block)
        del self._index[key]
        root = key[0]
        if root in self._root_children:
            self._root_children[root] -= 1
            if self._root_children[root] == 0:
                self._drop_root(root)

    def _drop_root(self, root: int) -> None:
        del self._root_children[root]
        del self._roots[self._root_salts.pop(root)]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InternalError(message)
