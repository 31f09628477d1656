"""From a specification to a matcher, with every refusal as an ``InvalidRequestError`` that names the field.

Compiling happens in the thread of whoever makes a request, before it is queued, without the interpreter's lock. The
result is kept: the engine thread, and the next request with the same schema, get copies of a matcher at its start.

JSON may have white space between its parts, but only so much in a row: a model that likes line breaks cannot go on
with them for ever. Keywords that cannot be enforced are refused, never skipped.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from numpy.typing import NDArray

from shoal.core.grammar import GrammarKind, GrammarSpec
from shoal.errors import InvalidRequestError
from shoal.grammar.vocabulary import LoadVocabulary, Vocabulary

# A line break and the indentation of eleven levels.
WHITE_SPACE = r"[\x20\x0A]{1,24}"
_KEPT = 128
_MAX_MESSAGE = 300


class GrammarCompiler:
    """Compiles for one model. Every method may be called from any thread.

    vocab_size: width of the model's logits; ids that the vocabulary lacks stand for nothing.
    """

    def __init__(self, load: LoadVocabulary, vocab_size: int) -> None:
        self.end_id = vocab_size  # its bit in a mask says that the text may end here
        self.mask_words = vocab_size // 32 + 1  # 32-bit words of a mask: a bit for every token and the end
        self._load = load
        self._lock = threading.Lock()  # guards the fields below
        self._tokens: _Tokens | None = None
        self._tokenizer: LLTokenizer | None = None
        self._starts: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()

    def check(self, spec: GrammarSpec) -> None:
        """Compile, or raise ``InvalidRequestError``."""
        self._start(spec)

    def matcher(self, spec: GrammarSpec) -> LLMatcher:
        """A new matcher at the start of the text."""
        return self._start(spec).deep_copy()

    def usable(self) -> NDArray[np.uint32]:
        """The mask of all tokens that stand for text, and of the end."""
        return self._prepare()[0].usable

    def _start(self, spec: GrammarSpec) -> LLMatcher:
        with self._lock:
            kept = self._starts.get(spec)
            if kept is not None:
                self._starts.move_to_end(spec)
                return kept
        start = _compile(spec, *self._prepare())
        with self._lock:
            self._starts[spec] = start
            if len(self._starts) > _KEPT:
                self._starts.popitem(last=False)
        return start

    def _prepare(self) -> tuple[_Tokens, LLTokenizer]:
        """Built with the first constraint, so that a start without any pays nothing."""
        with self._lock:
            if self._tokens is None or self._tokenizer is None:
                self._tokens = _Tokens(self._load(), self.end_id)
                self._tokenizer = LLTokenizer(self._tokens, n_vocab=self.end_id + 1)  # type: ignore[arg-type]
            return self._tokens, self._tokenizer


class _Tokens:
    """What the library asks of a tokenizer, with the end as a token of its own behind all others."""

    def __init__(self, vocabulary: Vocabulary, size: int) -> None:
        known = vocabulary.tokens[:size]
        self._encode = vocabulary.encode
        self.is_tokenizer_wrapper = True
        self.tokens = [*known, *[b""] * (size - len(known)), b""]
        self.eos_token_id = size
        self.bos_token_id = None
        self.special_token_ids = [index for index, text in enumerate(self.tokens) if not text]
        bits = np.zeros((size // 32 + 1) * 32, np.bool_)
        bits[: size + 1] = [bool(text) for text in self.tokens]
        bits[size] = True
        self.usable: NDArray[np.uint32] = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)

    def __call__(self, text: str) -> list[int]:
        return list(self._encode(text))


def _compile(spec: GrammarSpec, tokens: _Tokens, tokenizer: LLTokenizer) -> LLMatcher:
    # Not verbose: errors must not quote the whole grammar back.
    matcher = LLMatcher(tokenizer, _grammar(spec), log_level=0, limits=LLParserLimits(verbose_errors=False))
    if matcher.is_error():
        raise InvalidRequestError(spec.field, _short(matcher.get_error()))
    probe = matcher.deep_copy()
    mask = np.frombuffer(probe.compute_bitmask(), np.uint8)
    if probe.is_stopped() or not (mask & tokens.usable.view(np.uint8)[: len(mask)]).any():
        reason = _short(probe.get_error())
        raise InvalidRequestError(spec.field, "allows no text at all" + (f" ({reason})" if reason else ""))
    return matcher


def _grammar(spec: GrammarSpec) -> str:
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            # Overrides, so that a schema cannot change them from inside.
            return LLMatcher.grammar_from_json_schema(
                spec.text, overrides={"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE, "lenient": False}
            )
        case GrammarKind.REGEX:
            # Classes are ASCII: who writes \d in a format means 0 to 9.
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(spec.text, 'dws')}/")
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(spec.text)


def _short(message: str) -> str:
    """The library's message on one line, without the traces that some of its failures carry."""
    message = " ".join(message.partition("<backtrace>")[0].replace("<non-verbose/>", "").split())
    if message.startswith("panic:"):
        message = f"cannot be compiled: {message.removeprefix('panic:').strip()}"
    return message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + " ..."
