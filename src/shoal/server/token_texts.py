"""Tokens as answers show them.

A token may be half a character. Its text then has U+FFFD where bytes are missing, and its ``bytes`` say exactly what
it is; in the completion format, which has no place for bytes, such a token is spelled ``bytes:\\xe2\\x82``, as OpenAI
spells it.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.text.detokenizer import Detokenizer
from shoal.text.tokenizer import Tokenizer


class TokenTexts:
    """Spellings of one model's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, token_id: int) -> str:
        """The token's text alone, with U+FFFD for what is no character by itself."""
        return self._bytes(token_id).decode("utf-8", "replace")

    def byte_values(self, token_id: int) -> list[int]:
        """The token's bytes; a control token's are those of its spelling."""
        return list(self._bytes(token_id))

    def spelling(self, token_id: int) -> str:
        """The token's text if it is one, otherwise its bytes spelled out."""
        data = self._bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def offsets(self, start: int = 0) -> TokenOffsets:
        """Where the tokens of a text to come begin, the first of them at ``start``."""
        return TokenOffsets(self._tokenizer, start)

    def prompt_offsets(self, token_ids: Sequence[int], prompt: str) -> list[int]:
        """Where each token of a prompt begins in its text, in characters.

        What the tokenizer put in front of the text (a begin token, a space) takes no room in it.
        """
        detokenizer = Detokenizer(self._tokenizer, skip_special=False)
        starts, position = [], 0
        for token_id in token_ids:
            starts.append(position)
            position += len(detokenizer.push(token_id))
        added = position + len(detokenizer.flush()) - len(prompt)
        return [max(0, start - added) for start in starts]

    def _bytes(self, token_id: int) -> bytes:
        # A model's vocabulary may be padded beyond its tokenizer's.
        return self._tokenizer.token_bytes(token_id) if token_id < self._tokenizer.vocab_size else b""


class TokenOffsets:
    """Where each token of one completion begins in its text, in characters: after all characters that are complete."""

    def __init__(self, tokenizer: Tokenizer, start: int) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._position = start

    def push(self, token_id: int) -> int:
        """The next token's offset."""
        start = self._position
        self._position += len(self._detokenizer.push(token_id))
        return start
