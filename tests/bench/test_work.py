from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.bench.work import MIXED_REQUESTS, Work, draw
from shoal.errors import ConfigError

VOCABULARY = [3, 5, 8, 13]


@given(st.integers(1, 40), st.integers(2, 40), st.integers(1, 8), st.integers())
def test_a_plain_load_has_exactly_the_lengths_asked_for(prompt: int, output: int, batch: int, seed: int) -> None:
    items = draw(Work(prompt_len=prompt, output_len=output), batch, VOCABULARY, seed)
    assert len(items) == batch
    assert {len(item.prompt_ids) for item in items} == {prompt}
    assert {item.output_len for item in items} == {output}
    assert {token for item in items for token in item.prompt_ids} <= set(VOCABULARY)


@given(st.integers(1, 500), st.integers(2, 500), st.integers(1, 8), st.integers())
def test_a_mixed_load_stays_within_its_maxima(prompt: int, output: int, batch: int, seed: int) -> None:
    work = Work(prompt_len=prompt, output_len=output, mixed=True)
    items = draw(work, batch, VOCABULARY, seed)
    assert len(items) == MIXED_REQUESTS * batch
    assert all(1 <= len(item.prompt_ids) <= prompt and 1 <= item.output_len <= output for item in items)
    assert items == draw(work, batch, VOCABULARY, seed)


def test_a_mixed_load_has_a_long_tail() -> None:
    work = Work(prompt_len=1000, output_len=1000, mixed=True)
    lengths = sorted(len(item.prompt_ids) for item in draw(work, 200, VOCABULARY, 0))
    assert 150 < lengths[len(lengths) // 2] < 250
    assert lengths[0] < 50
    assert 0.02 < sum(length == 1000 for length in lengths) / len(lengths) < 0.1


def test_seeds_and_batches_have_their_own_prompts() -> None:
    work = Work(prompt_len=50, output_len=2)
    prompts = {draw(work, batch, VOCABULARY, seed)[0].prompt_ids for batch in (1, 2) for seed in range(3)}
    assert len(prompts) == 6


@pytest.mark.parametrize(
    ("lengths", "field"),
    [({"prompt_len": 0, "output_len": 9}, "prompt_len"), ({"prompt_len": 1, "output_len": 1}, "output_len")],
)
def test_lengths_are_checked(lengths: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Work(**lengths)
    assert caught.value.field == field


def test_blocks_hold_every_sequence_at_its_longest() -> None:
    assert Work(prompt_len=10, output_len=7).blocks(3, 16) == 6
    assert Work(prompt_len=10, output_len=6, mixed=True).blocks(3, 16) == 3
