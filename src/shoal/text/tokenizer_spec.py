"""What a model file says about its tokenizer, checked.

Token types are ggml's: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.errors import ModelFileError, UnsupportedModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

BYTE_LEVEL = "gpt2"
SENTENCE_PIECE = "llama"

# Control tokens that end a turn or a text whatever the file calls its end-of-sequence token.
END_TEXTS = frozenset(
    {
        "<|im_end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "</s>",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpec:
    """model: "gpt2" (byte-level BPE) or "llama" (SentencePiece). pre: name of the pre-tokenizer (byte-level only)."""

    model: str
    pre: str
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    scores: tuple[float, ...]
    bos_id: int | None
    eos_id: int | None
    end_ids: frozenset[int]
    unknown_id: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, path: str) -> TokenizerSpec:
        """From the ``tokenizer.ggml`` keys. ModelFileError names the key, UnsupportedModelError the model."""
        keys = _Keys(metadata, path)
        model = keys.text("model")
        if model not in (BYTE_LEVEL, SENTENCE_PIECE):
            raise UnsupportedModelError(
                f"{path}: tokenizer.ggml.model {model!r}; supported are {BYTE_LEVEL!r} (byte-level BPE) and "
                f"{SENTENCE_PIECE!r} (SentencePiece)"
            )
        tokens = keys.texts("tokens")
        if not tokens:
            raise keys.error("tokens", "must hold at least one token")
        count = len(tokens)
        types = keys.integers("token_type", count) or (NORMAL,) * count
        sentence_piece = model == SENTENCE_PIECE
        scores = keys.floats("scores", count)
        if sentence_piece and not scores:
            raise keys.error("scores", "the key is missing; a SentencePiece vocabulary needs scores")
        merges = keys.texts("merges", default=()) if sentence_piece else keys.texts("merges")
        ids = {name: keys.token_id(name, count) for name in ("bos", "eos", "unknown", "eot", "eom", "eog")}
        ends = {ids[name] for name in ("eos", "eot", "eom", "eog")} - {None}
        ends |= {i for i, kind in enumerate(types) if kind == CONTROL and tokens[i] in END_TEXTS}
        return cls(
            model=model,
            pre=keys.text("pre", default="default"),
            tokens=tokens,
            token_types=types,
            merges=merges,
            scores=scores,
            bos_id=ids["bos"],
            eos_id=ids["eos"],
            end_ids=frozenset(i for i in ends if i is not None),
            unknown_id=ids["unknown"],
            add_bos=keys.flag("add_bos_token", default=sentence_piece) and ids["bos"] is not None,
            add_eos=keys.flag("add_eos_token", default=False) and ids["eos"] is not None,
            add_space_prefix=keys.flag("add_space_prefix", default=sentence_piece),
        )


class _Keys:
    def __init__(self, metadata: Mapping[str, Any], path: str) -> None:
        self._metadata = metadata
        self._path = path

    def error(self, key: str, message: str) -> ModelFileError:
        return ModelFileError(self._path, f"tokenizer.ggml.{key}", message)

    def get(self, key: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.error(key, "the key is missing" if value is None else f"must be a string, found {value!r}")
        return value

    def texts(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.error(key, "the key is missing")
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "must be an array of strings")
        return tuple(value)

    def integers(self, key: str, count: int) -> tuple[int, ...]:
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            raise self.error(key, "must be an array of integers")
        if len(value) != count:
            raise self.error(key, f"holds {len(value)} values for {count} tokens")
        if len(value) and not (value.min() >= NORMAL and value.max() <= BYTE):
            raise self.error(key, f"token types are {NORMAL} to {BYTE}")
        return tuple(value.tolist())

    def floats(self, key: str, count: int) -> tuple[float, ...]:
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
            raise self.error(key, "must be an array of numbers")
        if len(value) != count:
            raise self.error(key, f"holds {len(value)} values for {count} tokens")
        if any(math.isnan(item) for item in value.tolist()):
            raise self.error(key, "holds values that are not numbers")
        return tuple(value.tolist())

    def token_id(self, name: str, count: int) -> int | None:
        key = f"{name}_token_id"
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be an integer, found {value!r}")
        # Converters write the largest number for "none".
        if value in (-1, 2**32 - 1):
            return None
        if not 0 <= value < count:
            raise self.error(key, f"must be in [0, {count}), found {value}")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, found {value!r}")
        return value
