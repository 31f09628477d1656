"""The tokens as a grammar sees them: bytes, or nothing for those that stand for no text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """Tokens and how the model spells.

    tokens: ``tokens[i]`` is the text of token i; empty for control tokens and others that no constrained text may hold.
    encode: a piece of text as the model's own tokens; text that a grammar leaves no choice about is spelled so.
    """

    tokens: tuple[bytes, ...]
    encode: Callable[[str], Sequence[int]]


LoadVocabulary = Callable[[], Vocabulary]
"""Gives the vocabulary when the first constraint comes; called once."""
