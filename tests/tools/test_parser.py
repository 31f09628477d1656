"""The parser of tool calls: the same result for every way of cutting a text, and nothing lost."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.tools.formats import CALL_CLOSE, CALL_OPEN, MISTRAL_OPEN, PYTHON_TAG, ToolFormat
from shoal.tools.parser import ContentDelta, ToolCallDelta, ToolCallParser

NAMES = frozenset({"f", "get_weather"})
HERMES, LLAMA3, MISTRAL = ToolFormat.HERMES, ToolFormat.LLAMA3, ToolFormat.MISTRAL
Call = tuple[str, str, str]


def parse(format: ToolFormat, pieces: Iterable[str], **options: Any) -> tuple[str, list[Call]]:
    """Content and (id, name, arguments) of each call, after checking the deltas' own rules."""
    numbers = itertools.count()
    parser = ToolCallParser(format, NAMES, new_id=lambda: f"id{next(numbers)}", **options)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    content = ""
    calls: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            assert delta.text
            content += delta.text
        elif delta.name is not None:
            assert delta.index == len(calls)
            assert delta.id is not None
            calls.append([delta.id, delta.name, delta.arguments])
        else:
            assert delta == ToolCallDelta(len(calls) - 1, None, None, delta.arguments)
            calls[-1][2] += delta.arguments
    assert parser.num_calls == len(calls)
    return content, [(call[0], call[1], call[2]) for call in calls]


def hermes(name: str = "f", arguments: str = "{}") -> str:
    return f'{CALL_OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{CALL_CLOSE}'


JSON_TEXTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from([CALL_OPEN, CALL_CLOSE, '"}', "\\", "{["]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
ARGUMENTS = st.builds(
    json.dumps, st.dictionaries(st.text(max_size=5), JSON_TEXTS, max_size=3), ensure_ascii=st.booleans()
)
# Texts that nearly are calls, so that every branch is met.
SCRAPS = st.sampled_from(
    [
        *(
            CALL_OPEN,
            CALL_CLOSE,
            MISTRAL_OPEN,
            PYTHON_TAG,
            "<tool",
            "</tool_call",
            "[TOOL",
            " ",
            "\n",
            ";",
            ",",
            "[",
            "]",
        ),
        *("{", "}", '"', "\\", "text", '{"name": "f", "arguments": {"a": [1]}}', '{"name": "g", "arguments": {}}'),
        *('{"name": "f", "parameters": {}}', '{"name": "f"}', '{"name": "f", "arguments": "x"}', '"arguments": {', "é"),
        *('[{"name": "f", "arguments": {}}]', hermes(), hermes("g"), '{"name": "f", "arguments": {"a": NaN}}'),
    ]
)
TEXTS = st.lists(SCRAPS, max_size=8).map("".join)


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(
    st.sampled_from(ToolFormat),
    TEXTS,
    st.lists(st.integers(0, 10**6), max_size=12),
    st.booleans(),
    st.sampled_from([None, 1, 2]),
)
@example(HERMES, hermes() + "\n" + hermes("g"), [3, 17], False, None)
def test_every_cut_gives_the_same(
    format: ToolFormat, text: str, places: list[int], trusted: bool, max_calls: int | None
) -> None:
    whole = parse(format, [text], trusted=trusted, max_calls=max_calls)
    assert parse(format, cut(text, places), trusted=trusted, max_calls=max_calls) == whole
    assert parse(format, list(text), trusted=trusted, max_calls=max_calls) == whole


@given(st.sampled_from(ToolFormat), TEXTS)
def test_calls_are_calls_and_nothing_else_is_lost(format: ToolFormat, text: str) -> None:
    content, calls = parse(format, [text])
    for _, name, arguments in calls:
        assert name in NAMES
        assert isinstance(json.loads(arguments), dict)
        assert arguments in text
    if not calls:
        assert content == text
    # What the calls' syntax may take away: tags, brackets, separators, their own objects, white space.
    taken = len(re.sub(r"\s", "", text)) - len(re.sub(r"\s", "", content))
    most = sum(len(re.sub(r"\s", "", arguments)) + 80 for _, _, arguments in calls)
    assert 0 <= taken <= most


@given(st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), min_size=1, max_size=3), st.booleans())
def test_well_formed_calls_are_found_exactly(wanted: list[tuple[str, str]], trusted: bool) -> None:
    expected = [(f"id{index}", name, arguments) for index, (name, arguments) in enumerate(wanted)]
    text = "Let me see.\n" + "\n".join(hermes(*call) for call in wanted) + "\nDone."
    assert parse(HERMES, [text], trusted=trusted) == ("Let me see.\nDone.", expected)
    items = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in wanted]
    for text in (f"{MISTRAL_OPEN}[{', '.join(items)}]", f" [{','.join(items)}]"):
        assert parse(MISTRAL, [text], trusted=trusted) == ("", expected)
    items = [item.replace('"arguments"', '"parameters"', 1) for item in items]
    for text in ("; ".join(items), PYTHON_TAG + ";".join(items)):
        assert parse(LLAMA3, [text], trusted=trusted) == ("", expected)


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "ends in a beginning <tool_",
        "spaces stay \n ",
        hermes("unknown"),
        f"{CALL_OPEN}[1]{CALL_CLOSE}",
        f'{CALL_OPEN}{{"name": "f", "arguments": {{}}}} and more{CALL_CLOSE}',
        f'{CALL_OPEN}{{"name": "f", "arguments": {{"a": 1',
        f'{CALL_OPEN}{{"name": "f", "name": "f", "arguments": {{}}}}{CALL_CLOSE}',
        f'{CALL_OPEN}{{"name": "f", "arguments": {{}}, "else": 1}}{CALL_CLOSE}',
        f'{CALL_OPEN}{{"name": "f", "arguments": {{}}, "parameters": {{}}}}{CALL_CLOSE}',
        f'{CALL_OPEN}{{"name": "f" "arguments": {{}}}}{CALL_CLOSE}',
        f'{CALL_OPEN}{{"name": "f", "arguments": {{"a": {"[" * 100_000}{"]" * 100_000}}}}}{CALL_CLOSE}',
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert parse(HERMES, [text]) == (text, [])


def test_a_call_after_a_malformed_one_is_found() -> None:
    content, calls = parse(HERMES, [f"{CALL_OPEN}oops" + hermes("f", '{"a": 1}')])
    assert content == f"{CALL_OPEN}oops"
    assert calls == [("id0", "f", '{"a": 1}')]


def test_a_text_that_ends_behind_the_object_is_a_call() -> None:
    assert parse(HERMES, [hermes().removesuffix(CALL_CLOSE)]) == ("", [("id0", "f", "{}")])
    assert parse(HERMES, [hermes()[:-3]]) == ("", [("id0", "f", "{}")])


def test_llama_calls_stand_alone_at_the_start() -> None:
    call = '{"name": "f", "parameters": {}}'
    assert parse(LLAMA3, [f"Well: {call}"]) == (f"Well: {call}", [])
    assert parse(LLAMA3, [f"{call} and text"]) == (" and text", [("id0", "f", "{}")])
    assert parse(LLAMA3, ['{"an": "answer"}']) == ('{"an": "answer"}', [])
    assert parse(LLAMA3, [f"{call}; {{broken"]) == ("; {broken", [("id0", "f", "{}")])


def test_what_comes_after_the_last_allowed_call_is_content() -> None:
    assert parse(HERMES, [hermes() + hermes()], max_calls=1) == (hermes(), [("id0", "f", "{}")])


def test_text_is_given_out_at_once_and_only_a_possible_beginning_is_held() -> None:
    parser = ToolCallParser(HERMES, NAMES, new_id=lambda: "id")
    assert parser.push("Hello <to") == [ContentDelta("Hello")]
    assert parser.push("day") == [ContentDelta(" <today")]
    assert parser.push(hermes()[:-1]) == []
    assert parser.push(">") == [ToolCallDelta(0, "id", "f", "{}")]
    assert parser.finish() == []


def test_a_trusted_call_is_streamed() -> None:
    parser = ToolCallParser(HERMES, NAMES, trusted=True, new_id=lambda: "id")
    assert parser.push('<tool_call>\n{"name": "f", "arguments": ') == []
    assert parser.push('{"a') == [ToolCallDelta(0, "id", "f", '{"a')]
    assert parser.push('": "}') == [ToolCallDelta(0, None, None, '": "}')]
    assert parser.push('"}}\n') == [ToolCallDelta(0, None, None, '"}')]
    assert parser.push("</tool_call>") == []
    assert parser.finish() == []


def test_a_trusted_call_that_is_cut_off_stays_a_call() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": [1, '
    assert parse(HERMES, [text], trusted=True) == ("", [("id0", "f", '{"a": [1, ')])
    assert parse(HERMES, [text[:20]], trusted=True) == (text[:20], [])
