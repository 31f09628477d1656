"""The block pool against a twin that remembers whole prefixes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.block_pool import NO_PREFIX, BlockPool, Match
from shoal.core.errors import InternalError

SIZE = 2
NOTHING = Match((), NO_PREFIX)


def publish_all(pool: BlockPool, salt: str, blocks: tuple[int, ...], tokens: list[int], match: Match) -> int:
    """Publish what follows the matched blocks."""
    begin, prefix = len(match.blocks), match.prefix_id
    if begin == 0:
        prefix = pool.root(salt)
    for number in range(begin, len(tokens) // SIZE):
        piece = tuple(tokens[number * SIZE : (number + 1) * SIZE])
        prefix = pool.publish(blocks[number], prefix, piece)
    return prefix


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from("xy"), st.lists(st.integers(0, 1), min_size=2, max_size=8)), max_size=20))
def test_matches_are_exact(texts: list[tuple[str, list[int]]]) -> None:
    """Big enough never to evict: what is found is exactly the longest run of whole blocks seen before."""
    pool = BlockPool(200, SIZE)
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for salt, tokens in texts:
        whole = len(tokens) // SIZE
        wanted = 0
        while wanted < whole and (salt, tuple(tokens[: (wanted + 1) * SIZE])) in seen:
            wanted += 1
        match = pool.match(salt, tokens, whole)
        assert len(match.blocks) == wanted
        pool.share(match.blocks)
        table = match.blocks + pool.allocate(whole - wanted)
        publish_all(pool, salt, table, tokens, match)
        seen |= {(salt, tuple(tokens[: (n + 1) * SIZE])) for n in range(whole)}
        pool.check()
        pool.free(table)
        pool.check()
    pool.check_all_free()


@settings(max_examples=300)
@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from("xy"), st.lists(st.integers(0, 1), min_size=2, max_size=8)), max_size=25),
)
def test_a_found_block_holds_what_it_is_said_to_hold(blocks: int, texts: list[tuple[str, list[int]]]) -> None:
    """Small enough to evict all the time: every block that is found was last written with exactly that prefix."""
    pool = BlockPool(blocks, SIZE)
    content: dict[int, tuple[str, tuple[int, ...]]] = {}
    for salt, tokens in texts:
        whole = min(len(tokens) // SIZE, blocks)
        match = pool.match(salt, tokens, whole)
        for number, block in enumerate(match.blocks):
            assert content[block] == (salt, tuple(tokens[: (number + 1) * SIZE]))
        pool.share(match.blocks)
        table = match.blocks + pool.allocate(whole - len(match.blocks))
        for number in range(len(match.blocks), whole):
            content[table[number]] = (salt, tuple(tokens[: (number + 1) * SIZE]))
        publish_all(pool, salt, table, tokens[: whole * SIZE], match)
        pool.check()
        pool.free(table)
        pool.check()
    pool.check_all_free()


def test_the_tail_is_evicted_before_the_head() -> None:
    pool = BlockPool(3, SIZE)
    table = pool.allocate(3)
    publish_all(pool, "x", table, [1, 2, 3, 4, 5, 6], NOTHING)
    pool.free(table)
    assert pool.allocate(1) == (table[2],)
    assert pool.match("x", [1, 2, 3, 4, 5, 6], 3).blocks == table[:2]


def test_blank_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(2, SIZE)
    table = pool.allocate(1)
    publish_all(pool, "x", table, [1, 2], NOTHING)
    pool.free(table)
    assert pool.allocate(1) != table
    assert pool.num_cached == 1


def test_salts_leave_nothing_behind() -> None:
    pool = BlockPool(1, SIZE)
    for number in range(50):
        table = pool.allocate(1)
        publish_all(pool, f"salt {number}", table, [1, 2], NOTHING)
        pool.free(table)
        pool.check()
    assert len(pool._roots) == 1


def test_misuse_is_an_internal_error() -> None:
    pool = BlockPool(1, SIZE)
    with pytest.raises(InternalError, match="2 blocks wanted, 1 are free"):
        pool.allocate(2)
    with pytest.raises(InternalError, match="nobody holds it"):
        pool.free((0,))
    with pytest.raises(InternalError, match="not published"):
        pool.share((0,))
    (block,) = pool.allocate(1)
    with pytest.raises(InternalError, match="cannot be published"):
        pool.publish(block, pool.root("x"), (1,))
