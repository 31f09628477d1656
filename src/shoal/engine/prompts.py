"""Telling one prompt from a list of prompts, and each kind of prompt from the others.

A prompt is a string, a list of token ids, or a list of chat messages. A list is *one* prompt if its first item is a
number (token ids) or a mapping (a chat message); otherwise it is a list of prompts, of any kinds mixed. The empty
list is no prompts; ``[[]]`` is one prompt of no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from shoal.errors import InvalidRequestError

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
Prompts = Prompt | Sequence[Prompt]

_EXPECTED = "a string, a list of token ids, a list of chat messages, or a list of these"


def split_prompts(prompts: Prompts) -> list[Prompt]:
    """The single prompts, in order; what they hold is checked when each is encoded."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Sequence):
        raise InvalidRequestError("prompts", f"must be {_EXPECTED}, got {type(prompts).__name__}")
    if not prompts:
        return []
    if is_token_prompt(prompts) or is_chat_prompt(prompts):
        return [prompts]
    for position, prompt in enumerate(prompts):
        if not isinstance(prompt, (str, Sequence)) or isinstance(prompt, bytes):
            raise InvalidRequestError(
                "prompts", f"item {position} must be a prompt ({_EXPECTED}), got {type(prompt).__name__}"
            )
    return list(prompts)  # type: ignore[arg-type]


def is_chat_prompt(prompt: Sequence[object]) -> TypeGuard[Sequence[Message]]:
    """Whether this is a list of chat messages."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def is_token_prompt(prompt: Sequence[object]) -> TypeGuard[Sequence[int]]:
    """Whether this is a list of token ids (of numbers at least; which are valid ids is checked later)."""
    return not isinstance(prompt, str) and len(prompt) > 0 and not isinstance(prompt[0], (str, Mapping, Sequence))
