"""Log-probabilities in the two shapes that OpenAI has for them.

There is one entry for every token of a completion, those that ended it included, so the entries are as many as the
usage counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.core.plan import TokenLogprobs
from shoal.server.token_texts import TokenTexts


def chat_entries(
    texts: TokenTexts, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int
) -> list[dict[str, Any]]:
    """``logprobs.content`` of a chat answer, with so many alternatives."""
    return [
        {
            **_chat_token(texts, token_id, entry.logprob),
            "top_logprobs": [_chat_token(texts, other, value) for other, value in entry.top[:top]],
        }
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]


def _chat_token(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.text(token_id), "logprob": logprob, "bytes": texts.byte_values(token_id)}


def completion_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], offsets: Sequence[int]
) -> dict[str, list[Any]]:
    """``logprobs`` of a completion's choice. A prompt's first token has none: nothing came before it."""
    return {
        "tokens": [texts.spelling(token_id) for token_id in token_ids],
        "token_logprobs": [None if entry is None else entry.logprob for entry in logprobs],
        "top_logprobs": [
            None if entry is None else _alternatives(texts, token_id, entry)
            for token_id, entry in zip(token_ids, logprobs, strict=True)
        ],
        "text_offset": list(offsets),
    }


def joined(parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """The logprobs of a stream's pieces as one."""
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


def _alternatives(texts: TokenTexts, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
    """The most likely tokens, and in any case the one that was chosen. Of two with one spelling the likelier counts."""
    found: dict[str, float] = {}
    for other, value in entry.top:
        found.setdefault(texts.spelling(other), value)
    found.setdefault(texts.spelling(token_id), entry.logprob)
    return found
