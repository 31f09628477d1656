"""Text to token ids and token ids to bytes, on the ``tokenizers`` library.

The library does the merging. What it is not asked to do is recognise control tokens: the text is cut at them here, and
only where the caller says that control tokens count. So a user who types ``<|im_end|>`` gets the characters, and only
a chat template's own text gets the token.

Two families: byte-level BPE (vocabularies spell bytes as printable characters) and SentencePiece BPE (a space is
spelled U+2581, bytes without a token of their own are spelled ``<0xNN>``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.models import BPE

from shoal.errors import InvalidRequestError, ModelFileError
from shoal.text.pre_tokenizers import WHOLE_WORDS_FIRST, make_pre_tokenizer
from shoal.text.tokenizer_spec import (
    BYTE,
    CONTROL,
    SENTENCE_PIECE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    TokenizerSpec,
)

__all__ = ["Tokenizer", "TokenizerSpec"]

SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Immutable, and safe to use from several threads."""

    def __init__(self, spec: TokenizerSpec, *, path: str = "tokenizer") -> None:
        self.spec = spec
        self._sentence_piece = spec.model == SENTENCE_PIECE
        kinds = spec.token_types
        self._control = frozenset(i for i, kind in enumerate(kinds) if kind == CONTROL)
        user_defined = [i for i, kind in enumerate(kinds) if kind == USER_DEFINED]
        self._special_ids = {spec.tokens[i]: i for i in (*user_defined, *sorted(self._control)) if spec.tokens[i]}
        self._cut_at_user_defined = alternation(spec.tokens[i] for i in user_defined)
        self._cut_at_all = alternation(self._special_ids)
        self._library = _sentence_piece_library(spec) if self._sentence_piece else _byte_level_library(spec, path)
        self._bytes: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        """Number of tokens; ids are below it."""
        return len(self.spec.tokens)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, if there is one."""
        return self.spec.bos_id

    @property
    def eos_id(self) -> int | None:
        """The token that ends a text, if there is one."""
        return self.spec.eos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """All tokens by which the model ends its turn or the text."""
        return self.spec.end_ids

    @property
    def control_texts(self) -> tuple[str, ...]:
        """Spellings of the control tokens."""
        return tuple(self.spec.tokens[item] for item in sorted(self._control))

    def encode(self, text: str, *, parse_special: bool = False, add_special: bool = True) -> list[int]:
        """Token ids of a text, with the begin and end tokens the model asks for.

        parse_special: text that spells a control token becomes that token; otherwise it stays text.
        add_special: off leaves the begin and end tokens out.
        InvalidRequestError for text that is not Unicode (a lone surrogate).
        """
        return self.encode_segments([(text, parse_special)], add_special=add_special)

    def encode_segments(self, segments: Iterable[tuple[str, bool]], *, add_special: bool = True) -> list[int]:
        """Like ``encode`` for (text, parse_special) in a row. Neighbours with the same flag are one text."""
        ids: list[int] = []
        for text, parse_special in _joined(segments):
            ids += self._encode_piece(text, parse_special)
        if not add_special:
            return ids
        spec = self.spec
        if spec.add_bos and spec.bos_id is not None and ids[:1] != [spec.bos_id]:
            ids.insert(0, spec.bos_id)
        if spec.add_eos and spec.eos_id is not None:
            ids.append(spec.eos_id)
        return ids

    def encode_fragment(self, text: str) -> list[int]:
        """Token ids of a text from the middle of another: no begin or end tokens, no space in front."""
        return self._encode_piece(text, False, prefix=False)

    def token_text(self, token_id: int) -> str:
        """The vocabulary's spelling of a token."""
        return self.spec.tokens[token_id]

    def is_control(self, token_id: int) -> bool:
        """Whether a token steers the model rather than standing for text."""
        return token_id in self._control

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; a control token's are its spelling."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._make_bytes(token_id)
        return found

    def plain_bytes(self) -> tuple[bytes, ...]:
        """Every token's bytes; empty for tokens that stand for no text: control, unknown and unused ones."""
        types = self.spec.token_types
        return tuple(
            b"" if kind in (CONTROL, UNKNOWN, UNUSED) else self.token_bytes(index) for index, kind in enumerate(types)
        )

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD. Control tokens are left out unless wanted."""
        wanted = (item for item in token_ids if not (skip_special and item in self._control))
        return b"".join(map(self.token_bytes, wanted)).decode("utf-8", errors="replace")

    def _encode_piece(self, text: str, parse_special: bool, *, prefix: bool = True) -> list[int]:
        cut = self._cut_at_all if parse_special else self._cut_at_user_defined
        ids: list[int] = []
        # A split by a pattern with one group gives text and separators in turn.
        for number, piece in enumerate([text] if cut is None else cut.split(text)):
            if number % 2:
                ids.append(self._special_ids[piece])
            elif piece:
                ids += self._encode_plain(piece, prefix)
        return ids

    def _encode_plain(self, text: str, prefix: bool) -> list[int]:
        if self._sentence_piece:
            text = (SPACE if self.spec.add_space_prefix and prefix else "") + text.replace(" ", SPACE)
        try:
            return list(self._library.encode(text, add_special_tokens=False).ids)
        except (UnicodeEncodeError, TypeError):
            raise InvalidRequestError("prompt", "must be Unicode text; it holds a lone surrogate") from None

    def _make_bytes(self, token_id: int) -> bytes:
        text = self.spec.tokens[token_id]
        kind = self.spec.token_types[token_id]
        if kind in (CONTROL, USER_DEFINED):
            return text.encode("utf-8")
        if self._sentence_piece:
            match = _BYTE_TOKEN.fullmatch(text) if kind == BYTE else None
            return bytes([int(match[1], 16)]) if match else text.replace(SPACE, " ").encode("utf-8")
        table = _spelled_bytes()
        return b"".join(table[char] if char in table else char.encode("utf-8") for char in text)


@cache
def _spelled_bytes() -> Mapping[str, bytes]:
    """Byte-level vocabularies' spelling: printable Latin-1 as itself, the other bytes from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): bytes([byte]) for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + number): bytes([byte]) for number, byte in enumerate(others)})
    return table


def alternation(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Matches any of the texts, the longest first; None for none."""
    ordered = sorted({text for text in texts if text}, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, ordered))})") if ordered else None


def _joined(segments: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    held: list[str] = []
    flag = False
    for text, parse_special in segments:
        if held and parse_special != flag:
            yield "".join(held), flag
            held = []
        flag = parse_special
        held.append(text)
    if held:
        yield "".join(held), flag


def _byte_level_library(spec: TokenizerSpec, path: str) -> LibraryTokenizer:
    pre_tokenizer = make_pre_tokenizer(spec.pre, path)
    merges = [_pair(merge, path) for merge in spec.merges]
    vocab = _vocabulary(spec)
    try:
        model = BPE(vocab=vocab, merges=merges, ignore_merges=spec.pre in WHOLE_WORDS_FIRST)
    except Exception as error:  # the library raises a bare Exception that names the merge
        raise ModelFileError(path, "tokenizer.ggml.merges", str(error)) from error
    library = LibraryTokenizer(model)
    library.pre_tokenizer = pre_tokenizer
    return library


def _pair(merge: str, path: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not left or not space or not right or " " in right:
        raise ModelFileError(path, "tokenizer.ggml.merges", f"must be two tokens with a space between, found {merge!r}")
    return left, right


def _vocabulary(spec: TokenizerSpec) -> dict[str, int]:
    # If a spelling stands twice, the first counts, as in the reference implementations.
    vocab: dict[str, int] = {}
    for index, token in enumerate(spec.tokens):
        vocab.setdefault(token, index)
    return vocab


def _sentence_piece_library(spec: TokenizerSpec) -> LibraryTokenizer:
    """SentencePiece BPE merges the neighbours whose union has the best score, which is a list of merges by score."""
    vocab = _vocabulary(spec)
    usable = {token for token, index in vocab.items() if spec.token_types[index] not in (CONTROL, BYTE)}
    ranked = []
    for token in usable:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in usable and right in usable:
                ranked.append((-spec.scores[vocab[token]], vocab[token], vocab[left], left, right))
    ranked.sort()
    unknown = None if spec.unknown_id is None else spec.tokens[spec.unknown_id]
    merges = [(left, right) for *_, left, right in ranked]
    return LibraryTokenizer(BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
