"""What a load asks: made-up prompts of a given length, or a file's.

Made-up prompts are random common words, nearly all of them one token in every vocabulary, so that other servers, whose
tokenizer is not here, get prompts of about the same length. No two begin alike unless a shared beginning is asked for,
so a prefix cache finds what it should find and nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS = "chat", "completions"
PATHS: Mapping[str, str] = {CHAT: "/chat/completions", COMPLETIONS: "/completions"}
_COMMON = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city name team minute idea body back parent face level office door
health person art war history party result change morning reason research girl guy moment air teacher force
education
"""
_WORDS = tuple(_COMMON.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeUp:
    """prompt_words: of each prompt, the first ``shared_words`` of them the same in all. output_tokens: asked for."""

    prompt_words: int
    output_tokens: int
    shared_words: int = 0


def made_up(shape: MadeUp, count: int, *, endpoint: str, seed: int) -> list[dict[str, Any]]:
    """So many bodies; same seed, same bodies."""
    generator = random.Random(f"workload/{seed}")
    shared = random.Random("shared").choices(_WORDS, k=min(shape.shared_words, shape.prompt_words))
    bodies = []
    for _ in range(count):
        own = generator.choices(_WORDS, k=shape.prompt_words - len(shared))
        bodies.append({**_prompt(" ".join([*shared, *own]), endpoint), "max_tokens": shape.output_tokens})
    return bodies


def from_items(items: Sequence[Mapping[str, Any]], count: int, *, endpoint: str) -> list[dict[str, Any]]:
    """So many bodies from a file's lines, from the beginning again when they run out; the lines' ids are left out."""
    bodies = []
    for number in range(count):
        item = {name: value for name, value in items[number % len(items)].items() if name != "id"}
        if endpoint == CHAT and "prompt" in item:
            item |= _prompt(item.pop("prompt"), CHAT)
        elif endpoint == COMPLETIONS and "messages" in item:
            item["prompt"] = "\n".join(str(message.get("content") or "") for message in item.pop("messages"))
        bodies.append(item)
    return bodies


def _prompt(text: str, endpoint: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} if endpoint == CHAT else {"prompt": text}
