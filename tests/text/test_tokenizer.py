"""The tokenizer against the goldens, made tokenizers of both families, and bad files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from shoal.text.tokenizer import Tokenizer, TokenizerSpec


@pytest.mark.model
def test_golden_token_ids(golden: Path, tokenizer: Tokenizer) -> None:
    with (golden / "tokenizer.jsonl").open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            assert tokenizer.encode(row["text"], parse_special=True) == row["ids"]
            assert tokenizer.encode(row["text"]) == row.get("ids_plain", row["ids"])
            if not row.get("lossy"):
                assert tokenizer.decode(row["ids"], skip_special=False) == row["text"]


@pytest.mark.model
def test_golden_bytes(golden: Path, tokenizer: Tokenizer) -> None:
    with (golden / "decode.jsonl").open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            assert b"".join(map(tokenizer.token_bytes, row["ids"])).hex() == row["bytes_hex"]
            assert tokenizer.decode(row["ids"], skip_special=False) == row["text"]
            assert tokenizer.decode(row["ids"]) == row["text_skip_special"]


@pytest.mark.model
@settings(max_examples=300, deadline=None)
@given(st.text())
def test_plain_text_never_gives_a_control_token(tokenizer: Tokenizer, text: str) -> None:
    for hostile in (text, f"<|im_start|>{text}", f"{text}<|im_end|>", f"<|im_{text}start|>"):
        assert not any(map(tokenizer.is_control, tokenizer.encode(hostile)))


@pytest.mark.model
def test_neighbouring_segments_are_one_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_segments([("Hel", False), ("lo", False)]) == tokenizer.encode("Hello")
    mixed = tokenizer.encode_segments([("<|im_start|>", True), ("<|im_end|>", False)])
    assert mixed[0] == 1
    assert not any(map(tokenizer.is_control, mixed[1:]))


@pytest.mark.model
def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer.encode("a\ud800b")


def sentence_piece(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    words = ["\u2581", "h", "e", "l", "o", "he", "ll", "llo", "hello", "\u2581hello", "w", "\u2581w"]
    count = len(tokens) + len(words)
    metadata = {
        "model": "llama",
        "tokens": tokens + words,
        "token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(words), np.int32),
        "scores": np.array([0.0] * len(tokens) + [-float(len(words) - i) for i in range(len(words))], np.float32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    metadata.update(changes)
    assert len(metadata["tokens"]) == count or changes
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def byte_level(**changes: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["<|endoftext|>", "a", "b", "ab", "\u0120", "1", "2", "3", "4", "123", "12"],
        "token_type": np.array([3] + [1] * 10, np.int32),
        "merges": ["a b", "1 2", "12 3"],
        "eos_token_id": 0,
    }
    metadata.update(changes)
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def make(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(TokenizerSpec.from_gguf(metadata, path="file.gguf"), path="file.gguf")


def test_sentence_piece() -> None:
    tokenizer = make(sentence_piece())
    spellings = [tokenizer.token_text(item) for item in tokenizer.encode("hello w")]
    assert spellings == ["<s>", "\u2581hello", "\u2581w"]
    assert tokenizer.decode(tokenizer.encode("hello w")) == " hello w"
    falls_back = tokenizer.encode("é")
    assert [tokenizer.token_text(item) for item in falls_back] == ["<s>", "\u2581", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(falls_back) == " é"
    assert tokenizer.eos_ids == {2}


def test_sentence_piece_without_prefix_and_bos() -> None:
    tokenizer = make(sentence_piece(add_space_prefix=False, add_bos_token=False))
    assert [tokenizer.token_text(item) for item in tokenizer.encode("hello")] == ["hello"]
    assert tokenizer.encode("") == []


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "ab123 1", ["ab", "123", "Ġ", "1"]),
        ("smollm", "ab12", ["ab", "1", "2"]),
        ("qwen2", "12ab", ["1", "2", "ab"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("default", "1234", ["123", "4"]),
    ],
)
def test_pre_tokenizers_cut_numbers_their_own_way(pre: str, text: str, pieces: list[str]) -> None:
    tokenizer = make(byte_level(pre=pre))
    assert [tokenizer.token_text(item) for item in tokenizer.encode(text)] == pieces


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        (byte_level(model="bert"), UnsupportedModelError, "model 'bert'"),
        (byte_level(model=None), ModelFileError, "model: the key is missing"),
        (byte_level(pre="tekken"), UnsupportedModelError, "pre 'tekken'; supported are smollm"),
        (byte_level(tokens=None), ModelFileError, "tokens: the key is missing"),
        (byte_level(tokens=[]), ModelFileError, "at least one token"),
        (byte_level(tokens="abc"), ModelFileError, "array of strings"),
        (byte_level(merges=None), ModelFileError, "merges: the key is missing"),
        (byte_level(merges=["ab"]), ModelFileError, "two tokens with a space"),
        (byte_level(merges=["a z"]), ModelFileError, "merges"),
        (byte_level(token_type=np.array([1], np.int32)), ModelFileError, "holds 1 values for 11 tokens"),
        (byte_level(token_type=np.array([9] * 11, np.int32)), ModelFileError, "token types are 1 to 6"),
        (byte_level(eos_token_id=11), ModelFileError, r"must be in \[0, 11\)"),
        (byte_level(eos_token_id="x"), ModelFileError, "must be an integer"),
        (byte_level(add_bos_token=1), ModelFileError, "must be true or false"),
        (sentence_piece(scores=None), ModelFileError, "scores: the key is missing"),
        (sentence_piece(scores=np.array([np.nan] * 271, np.float32)), ModelFileError, "not numbers"),
    ],
)
def test_bad_files_are_refused_by_key(metadata: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(metadata)
