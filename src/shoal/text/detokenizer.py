"""Token bytes to text, token by token: nothing is emitted before it is certain, and nothing is emitted twice.

A token may end in the middle of a character. The incremental UTF-8 decoder of the standard library holds an
incomplete tail back and turns each maximal ill-formed part into U+FFFD, exactly as decoding everything at once would.
Constant time a token.
"""

from __future__ import annotations

import codecs

from shoal.text.tokenizer import Tokenizer

_make_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One completion's state. Control tokens give no text unless ``skip_special`` is off."""

    __slots__ = ("_decoder", "_skip_special", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = _make_decoder("replace")

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before."""
        if self._skip_special and self._tokenizer.is_control(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for half a character, else nothing."""
        return self._decoder.decode(b"", final=True)
