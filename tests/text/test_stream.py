"""Detokenizer and stop strings together, over made tokens that cut characters and stop strings anywhere."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shoal.text.stream import TextStream


class Pieces:
    """Token ids are indices into byte strings."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def is_control(self, token_id: int) -> bool:
        return False

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def cut(text: str, places: list[int]) -> list[bytes]:
    whole = text.encode()
    bounds = [0, *sorted(min(place, len(whole)) for place in places), len(whole)]
    return [whole[begin:end] for begin, end in pairwise(bounds)]


@given(st.text(alphabet="aäß🐟", max_size=30), st.lists(st.integers(0, 80), max_size=10))
def test_without_stop_strings_the_text_arrives_whole(text: str, places: list[int]) -> None:
    pieces = cut(text, places)
    stream = TextStream(Pieces(pieces))  # type: ignore[arg-type]
    shown = "".join(stream.push(token) for token in range(len(pieces)))
    assert shown + stream.flush() == text
    assert not stream.stopped


@given(
    st.text(alphabet="aä🐟", max_size=30),
    st.lists(st.text(alphabet="aä🐟", min_size=1, max_size=3), min_size=1, max_size=3),
    st.lists(st.integers(0, 80), max_size=10),
)
def test_nothing_of_a_stop_string_or_half_a_character_leaks(text: str, stops: list[str], places: list[int]) -> None:
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    first = min(ends, default=None)
    wanted = text
    if first is not None:
        longest = max(len(stop) for stop in stops if text[:first].endswith(stop))
        wanted = text[: first - longest]
    pieces = cut(text, places)
    stream = TextStream(Pieces(pieces), stops)  # type: ignore[arg-type]
    shown = ""
    for token in range(len(pieces)):
        shown += stream.push(token)
        assert wanted.startswith(shown)
        if stream.stopped:
            break
    if not stream.stopped:
        shown += stream.flush()
    assert shown == wanted
    assert stream.stopped == (first is not None)


def test_a_stop_string_made_by_the_last_half_character() -> None:
    stream = TextStream(Pieces([b"a", b"\xf0\x9f"]), ["\ufffd"])  # type: ignore[arg-type]
    assert stream.push(0) == "a"
    assert stream.push(1) == ""
    assert stream.flush() == ""
    assert stream.stopped


def test_stop_strings_do_not_count_before_the_least_length() -> None:
    stream = TextStream(Pieces([b"x", b"stop", b"st", b"op", b"y"]), ["stop"])  # type: ignore[arg-type]
    shown = [stream.push(0, stop_allowed=False), stream.push(1, stop_allowed=False)]
    assert shown == ["x", "stop"]
    # What began before the least length is not part of a stop string after it.
    assert stream.push(2, stop_allowed=False) == "st"
    assert stream.push(3) == "op"
    assert not stream.stopped
    assert stream.push(1) == ""
    assert stream.stopped
