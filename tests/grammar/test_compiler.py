"""What is compiled stays compiled as long as it is needed, and masks are what they would be without any shortcuts."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
from engine_support import VOCAB, byte_tokenizer, make_loaded
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from shoal import LLM, SamplingParams
from shoal.core.grammar import GrammarKind, GrammarSpec
from shoal.grammar import compiler as module
from shoal.grammar.compiler import GrammarCompiler
from shoal.grammar.vocabulary import Vocabulary


def make_compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: Vocabulary(byte_tokenizer().plain_bytes(), byte_tokenizer().encode_fragment), VOCAB)


def spec(number: int) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, f"[a-z]{{{number + 1}}}")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The constraints compiled so far, and in which thread."""
    found: list[tuple[str, str]] = []
    original = module._compile

    def compile(asked: GrammarSpec, *rest: Any) -> LLMatcher:
        found.append((asked.text, threading.current_thread().name))
        return original(asked, *rest)

    monkeypatch.setattr(module, "_compile", compile)
    return found


def test_what_is_held_is_compiled_once_however_many_there_are(compiled: list[tuple[str, str]]) -> None:
    compiler = make_compiler()
    held = [compiler.start(spec(number)) for number in range(200)]
    for number in range(200):
        compiler.matcher(spec(number))
    assert len(compiled) == 200
    assert len(set(map(id, held))) == 200


def test_what_nobody_holds_is_forgotten_but_for_the_last_ones(compiled: list[tuple[str, str]]) -> None:
    compiler = make_compiler()
    for number in range(200):
        compiler.start(spec(number))
    gc.collect()
    assert len(compiler._held) == len(compiler._recent) == 128
    compiler.start(spec(199))
    assert len(compiled) == 200
    compiler.start(spec(0))
    assert len(compiled) == 201


def test_the_engine_thread_never_compiles(compiled: list[tuple[str, str]]) -> None:
    """More distinct constraints wait than are remembered; each is compiled by its caller and by nobody else."""
    gate = threading.Event()
    with LLM.from_loaded(make_loaded(gate=gate, max_num_seqs=8, blocks=512)) as llm:
        streams = [
            llm.stream("p", SamplingParams(regex=spec(number % 50).text + str(number), max_tokens=60))
            for number in range(160)
        ]
        gate.set()
        texts = ["".join(chunk.text for chunk in stream) for stream in streams]
    assert all(text.endswith(str(number)) for number, text in enumerate(texts))
    assert len(compiled) == 160
    assert {thread for _, thread in compiled} == {threading.main_thread().name}


GRAMMARS = [
    GrammarSpec(GrammarKind.REGEX, "[a-zA-Z ,.]{20,}"),
    GrammarSpec(GrammarKind.REGEX, "[a-z0-9]{3,9}( [A-Z][a-z ]{0,7}[.!?]){2,}"),
    GrammarSpec(GrammarKind.REGEX, r"\w{4,}|[^,\n]{5,40}"),
    GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
    GrammarSpec(
        GrammarKind.JSON_SCHEMA,
        '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"type": "string", '
        '"pattern": "^[a-z ]{4,}$"}}, "required": ["a", "b"], "additionalProperties": false}',
    ),
    GrammarSpec(GrammarKind.LARK, 'start: WORD (" " WORD)*\nWORD: /[a-zA-Z]{2,8}/'),
]
WORDS = ["the", " the", "The", " of", "ab", " a", ", ", ". ", '"a', '": "', "}", "x1", "_y", "é", "\n", "  "]


@settings(max_examples=40, deadline=None)
@given(grammar=st.sampled_from(GRAMMARS), walk=st.lists(st.integers(0, 2**16), max_size=25))
def test_classes_of_characters_change_no_mask(grammar: GrammarSpec, walk: list[int]) -> None:
    """Against the library without any slices, along random texts over a vocabulary that has words."""
    tokens = (*(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS))
    compiler = GrammarCompiler(lambda: Vocabulary(tokens, lambda text: list(text.encode())), len(tokens))
    ours = compiler.matcher(grammar)
    prepared, _ = compiler._prepare()
    plain_tokenizer = LLTokenizer(prepared, n_vocab=compiler.end_id + 1, slices=[])  # type: ignore[arg-type]
    plain = module._compile(grammar, prepared, plain_tokenizer)
    for step in walk:
        masks = np.zeros((2, compiler.mask_words), np.int32)
        fill_next_token_bitmask(ours, masks, 0)
        fill_next_token_bitmask(plain, masks, 1)
        assert masks[0].tolist() == masks[1].tolist()
        bits = np.unpackbits(masks[0].view(np.uint8), bitorder="little")
        possible = np.flatnonzero(bits[: len(tokens)])
        if not len(possible):
            break
        token = int(possible[step % len(possible)])
        assert ours.consume_token(token) == plain.consume_token(token)
        if ours.is_stopped():
            break
