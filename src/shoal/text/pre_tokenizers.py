"""How byte-level vocabularies cut text before merging, by the names that GGUF files use.

Patterns are the models' own; a vocabulary only works with the one it was trained with, so an unknown name is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from shoal.errors import UnsupportedModelError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _bytes_only() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=False)


def _split(pattern: str) -> PreTokenizer:
    return Split(Regex(pattern), behavior="isolated")


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])


def _llama3() -> PreTokenizer:
    return Sequence([_split(_WORDS_LLAMA3), _bytes_only()])


def _qwen2() -> PreTokenizer:
    return Sequence([_split(_WORDS_QWEN2), _bytes_only()])


def _default() -> PreTokenizer:
    """Four cuts, each within the pieces of the one before; what files without a name are taken to mean."""
    return Sequence(
        [
            _split(r"[\p{P}\$\+<=>\^~\|]+"),
            _split(_WORDS_GPT2),
            _split(r"\p{N}+"),
            _split(r"[0-9][0-9][0-9]"),
            _bytes_only(),
        ]
    )


_BY_NAME: Mapping[str, Callable[[], PreTokenizer]] = MappingProxyType(
    {
        "smollm": _smollm,
        "llama-bpe": _llama3,
        "llama3": _llama3,
        "llama-v3": _llama3,
        "qwen2": _qwen2,
        "gpt-2": _gpt2,
        "gpt2": _gpt2,
        "default": _default,
    }
)

# These models take a whole word that is in the vocabulary before they try to merge.
WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3"})


def make_pre_tokenizer(name: str, path: str) -> PreTokenizer:
    """The pre-tokenizer of a name; UnsupportedModelError lists those that are known."""
    if name not in _BY_NAME:
        raise UnsupportedModelError(f"{path}: tokenizer.ggml.pre {name!r}; supported are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]()
