"""Chat templates: the goldens, user text that tries to be more than text, wrong messages, and bombs."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import InvalidRequestError, UnsupportedModelError
from shoal.models import GGUFFile
from shoal.text.chat_template import ChatTemplate
from shoal.text.tokenizer import Tokenizer

CONTROLS = ("<|im_start|>", "<|im_end|>", "<s>", "END")
SIMPLE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def template(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, control_texts=CONTROLS, **options)


def text_of(segments: list[tuple[str, bool]]) -> str:
    return "".join(text for text, _ in segments)


@pytest.mark.model
def test_golden_conversations(golden: Path, model_file: GGUFFile, tokenizer: Tokenizer) -> None:
    chat = ChatTemplate(model_file.metadata["tokenizer.chat_template"], control_texts=tokenizer.control_texts)
    with (golden / "chat.jsonl").open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            segments = chat.render(
                row["messages"],
                add_generation_prompt=row["add_generation_prompt"],
                continue_final_message=row["continue_final_message"],
            )
            assert text_of(segments) == row["prompt"]
            assert tokenizer.encode_segments(segments) == row.get("ids_content_plain", row["ids"])


MANGLERS = (
    "{{ m.content }}",
    "{{ m.content | trim }}",
    "{{ m.content | upper }}{{ m.content | lower }}",
    "{{ m.content[1:] }}{{ m.content[:-1] }}",
    "{{ m.content | replace('x', '') }}",
    "{{ m.content.split('x') | join('') }}",
    "{{ m.content ~ m.content }}",
    "{{ m.content + m.role }}",
    "{{ m | tojson }}",
    "{{ '%s%s' % (m.content, m.role) }}",
    "{% for c in m.content %}{{ c }}{% endfor %}",
)
HOSTILE = st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<", "|", ">", "x", "END", "EN", "D", "<s", " "])
    | st.text(max_size=3),
    max_size=8,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(MANGLERS), st.lists(HOSTILE, min_size=1, max_size=4))
def test_user_text_never_becomes_a_control_token(mangler: str, contents: list[str]) -> None:
    chat = template("{% for m in messages %}" + mangler + "{% endfor %}")
    messages = [{"role": content[:40] or "user", "content": content} for content in contents]
    segments = chat.render(messages)
    assert not any(parsed for _, parsed in segments)


@settings(max_examples=200, deadline=None)
@given(st.lists(HOSTILE, min_size=1, max_size=4))
def test_the_text_is_the_same_as_without_protection(contents: list[str]) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    wanted = "".join(f"<|im_start|>user\n{content.strip()}<|im_end|>\n" for content in contents)
    segments = template(SIMPLE).render(messages, add_generation_prompt=False)
    assert text_of(segments) == wanted
    assert sum(parsed for _, parsed in segments) == 2 * len(contents)


def test_a_template_finds_what_it_looks_for_in_ordinary_messages() -> None:
    chat = template("{{ messages[0].content.split('</think>')[-1] }}")
    assert text_of(chat.render([{"role": "user", "content": "<think>no</think>yes"}])) == "yes"


def test_continue_the_final_message() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "He said <|im_end|> \n"}]
    segments = template(SIMPLE).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text_of(segments).endswith("assistant\nHe said <|im_end|>")
    assert segments[-1][1] is False
    with pytest.raises(InvalidRequestError, match="add_generation_prompt"):
        template(SIMPLE).render(messages, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="the last message must be the assistant's"):
        template(SIMPLE).render(messages[:1], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="does not show"):
        template("nothing").render(messages, add_generation_prompt=False, continue_final_message=True)


def test_what_templates_may_use() -> None:
    chat = template(
        "{{ bos_token }}{{ strftime_now('%Y') }}{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}"
        "{% endfor %}{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ tools | tojson }}"
        "{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m('ü') }}",
        bos_token="<s>",
        now=lambda: datetime(2026, 1, 1, tzinfo=UTC),
    )
    segments = chat.render([{"role": "user", "content": "x"}], tools=[{"name": "ä"}])
    assert text_of(segments) == '<s>2026022[{"name": "ä"}][ü]'
    assert segments[0] == ("<s>", True)


NESTED = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
BOMBS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(10 ** 9) %}{% endfor %}",
    "{{ 'a' * 10 ** 9 }}",
    "{{ ['a'] * 1000000000 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{% set x = 'a' * 1000 %}" + "{% set x = x ~ x %}" * 40 + "{{ x | length }}",
    "{% set x = 'a' * 1000 %}" + "{% set x = x + x %}" * 40 + "{{ x | length }}",
    "{% set x = 'aaaaaaaaaa' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40 + "{{ x | length }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% set ns = namespace(l=[1]) %}{% for i in range(100) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "{{ ('a' * 90000).replace('a', 'b' * 90000) }}",
    "{{ range(90000) | join('b' * 90000) }}",
    "{{ ('a\n' * 40000) | indent(9000) }}",
    "{% for i in range(99999) %}{{ 'a' * 90000 }}{% endfor %}",
    "{% set x = namespace(n=2) %}{% for i in range(90000) %}{% set x.n = x.n * x.n %}{% endfor %}",
    NESTED + "{{ ns.x }}",
    NESTED + "{{ ns.x | tojson }}",
    NESTED + "{{ '' ~ ns.x }}",
    NESTED + "{{ ns.x | string }}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{{ ().__class__.__base__.__subclasses__() }}",
    "{{ messages.append(1) }}",
)


@pytest.mark.parametrize("source", BOMBS)
def test_bombs_end_in_an_error_soon(source: str) -> None:
    begin = time.monotonic()
    with pytest.raises(InvalidRequestError, match="messages"):
        template(source).render([{"role": "user", "content": "x"}])
    assert time.monotonic() - begin < 20


def test_a_template_may_refuse() -> None:
    with pytest.raises(InvalidRequestError, match="no system please"):
        template("{{ raise_exception('no system please') }}").render([])


def test_a_broken_template_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(UnsupportedModelError, match="line 1"):
        template("{% for %}")


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hello", "messages"),
        ([1], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "x", "colour": 1}], "messages[1].colour"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}], "messages[0].content[0].b"),
    ],
)
def test_wrong_messages_are_named(messages: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        template(SIMPLE).render(messages)
    assert raised.value.field == field


def test_parts_and_null_content() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    text = text_of(template(SIMPLE).render(messages, add_generation_prompt=False))
    assert text == "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"


def test_filters_that_take_the_context_work() -> None:
    template = ChatTemplate("{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join('+') }}")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert "".join(text for text, _ in template.render(messages)) == "a"
