"""The incremental detokenizer against decoding everything at once."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.text.detokenizer import Detokenizer


class ByteTokenizer:
    """Token ids are indices into a list of byte strings; 0 is a control token."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = [b"<control>", *pieces]

    def is_control(self, token_id: int) -> bool:
        return token_id == 0

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


@given(st.text(), st.binary(max_size=6), st.data())
def test_every_split_gives_the_same_text(text: str, junk: bytes, data: st.DataObject) -> None:
    whole = text.encode() + junk + text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    bounds = [0, *cuts, len(whole)]
    pieces = [whole[begin:end] for begin, end in pairwise(bounds)]
    detokenizer = Detokenizer(ByteTokenizer(pieces))  # type: ignore[arg-type]
    shown = ""
    for token in range(1, len(pieces) + 1):
        shown += detokenizer.push(token)
        assert whole.decode(errors="replace").startswith(shown)
    assert shown + detokenizer.flush() == whole.decode(errors="replace")
    assert detokenizer.flush() == ""


def test_control_tokens_do_not_break_a_character() -> None:
    pieces = ["ä".encode()[:1], "ä".encode()[1:]]
    skipping = Detokenizer(ByteTokenizer(pieces))  # type: ignore[arg-type]
    assert [skipping.push(token) for token in (1, 0, 2)] == ["", "", "ä"]
    showing = Detokenizer(ByteTokenizer(pieces), skip_special=False)  # type: ignore[arg-type]
    assert "".join(showing.push(token) for token in (1, 0, 2)) == "\ufffd<control>\ufffd"


@pytest.mark.model
def test_golden_streams(golden: Path, tokenizer: object) -> None:
    with (golden / "decode.jsonl").open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            detokenizer = Detokenizer(tokenizer, skip_special=False)  # type: ignore[arg-type]
            assert [detokenizer.push(token) for token in row["ids"]] == row["stream"]
            assert detokenizer.flush() == row["stream_final"]
