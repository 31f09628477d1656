"""Stop strings in pieces against a twin that looks at the complete text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.text.stop_strings import StopMatcher, StopStrings


def twin(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop string that ends first, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))], True
    return text, False


@settings(max_examples=400)
@given(
    st.lists(st.text(alphabet="aab", min_size=1, max_size=5), min_size=1, max_size=5),
    st.lists(st.text(alphabet="aabc", max_size=6), max_size=12),
)
def test_pieces_equal_the_whole(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    wanted, stopped = twin("".join(pieces), stops)
    shown, given_so_far = "", ""
    for piece in pieces:
        given_so_far += piece
        shown += matcher.push(piece)
        assert wanted.startswith(shown)
        # Held back is only what may still become a stop string.
        if not matcher.stopped:
            held = given_so_far[len(shown) :]
            assert not held or any(stop.startswith(held) for stop in stops)
    assert matcher.stopped == stopped
    assert shown + ("" if stopped else matcher.flush()) == wanted


def test_overlapping_beginnings_are_not_lost() -> None:
    matcher = StopMatcher(StopStrings(["aab"]))
    assert "".join(matcher.push(char) for char in "aaab") == "a"
    assert matcher.stopped
    assert matcher.push("more") == ""


def test_a_stop_string_inside_another_ends_first() -> None:
    matcher = StopMatcher(StopStrings(["abcd", "bc"]))
    assert matcher.push("xabcd") == "xa"
    assert matcher.stopped


def test_restart_forgets_what_had_begun() -> None:
    matcher = StopMatcher(StopStrings(["ab"]))
    assert matcher.push("a") == ""
    assert matcher.restart("x") == "ax"
    assert matcher.push("b") == "b"
    assert not matcher.stopped
