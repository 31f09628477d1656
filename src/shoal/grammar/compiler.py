"""From a specification to a matcher, with every refusal as an ``InvalidRequestError`` that names the field.

Compiling happens in the thread of whoever makes a request, before it is queued, without the interpreter's lock. The
result is kept as long as a request holds it, and the last ones used a while longer: the engine thread, which thus never
compiles, and the next request with the same schema get copies of a matcher at its start.

JSON may have white space between its parts, but only so much in a row: a model that likes line breaks cannot go on
with them for ever. Keywords that cannot be enforced are refused, never skipped.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from numpy.typing import NDArray

from shoal.core.grammar import GrammarKind, GrammarSpec
from shoal.errors import InvalidRequestError
from shoal.grammar.vocabulary import LoadVocabulary, Vocabulary

# A line break and the indentation of eleven levels.
WHITE_SPACE = r"[\x20\x0A]{1,24}"
# Classes of characters whose tokens are gathered beforehand. Where a grammar allows all of a class, its tokens are
# allowed at a stroke; without them each of thousands is walked through, in every step. The library's own are white
# space and what a JSON string may hold.
_CLASSES = (
    r"[a-z]{1,20}",
    r"[a-z ]{1,20}",
    r"[a-zA-Z]{1,20}",
    r"[a-zA-Z ]{1,20}",
    r"[a-zA-Z0-9]{1,20}",
    r"[a-zA-Z0-9 ]{1,20}",
    r"[a-zA-Z0-9_ ,.]{1,20}",
)
_RECENT = 128
_MAX_MESSAGE = 300


class Start:
    """A compiled constraint, at the start of the text."""

    __slots__ = ("__weakref__", "matcher")

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher


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
        self._held: WeakValueDictionary[GrammarSpec, Start] = WeakValueDictionary()  # by anybody
        self._recent: OrderedDict[GrammarSpec, Start] = OrderedDict()

    def matcher(self, spec: GrammarSpec) -> LLMatcher:
        """A new matcher at the start of the text."""
        return self.start(spec).matcher.deep_copy()

    def usable(self) -> NDArray[np.uint32]:
        """The mask of all tokens that stand for text, and of the end."""
        return self._prepare()[0].usable

    def start(self, spec: GrammarSpec) -> Start:
        """Compile if that was not done yet, or raise ``InvalidRequestError``."""
        with self._lock:
            start = self._held.get(spec)
        if start is None:
            start = Start(_compile(spec, *self._prepare()))
        with self._lock:
            self._held[spec] = self._recent[spec] = start
            self._recent.move_to_end(spec)
            if len(self._recent) > _RECENT:
                self._recent.popitem(last=False)
        return start

    def _prepare(self) -> tuple[_Tokens, LLTokenizer]:
        """Built with the first constraint, so that a start without any pays nothing."""
        with self._lock:
            if self._tokens is None or self._tokenizer is None:
                self._tokens = _Tokens(self._load(), self.end_id)
                self._tokenizer = LLTokenizer(
                    self._tokens,  # type: ignore[arg-type]
                    n_vocab=self.end_id + 1,
                    slices=[*LLTokenizer.general_slices(), *_CLASSES],
                )
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
