"""A conversation to the text that a model was trained on, with the control tokens where the template puts them.

The model file brings a Jinja template. It runs in a bounded sandbox (see ``sandbox``). What comes out is cut into the
template's own text, in which control tokens count, and text that came from the caller, in which they never do.

How the two are told apart, whatever the template does in between: if the caller's strings together hold the
characters of a control token's spelling in order, even far apart, then a marker, a private-use character that occurs
nowhere in template or messages, is put after each character such as ``<`` or ``|`` that marks such a spelling. With
markers inside it is no control token; after the rendering is cut at the real ones, the markers are taken out.
Stripping, slicing, deleting from or joining user text cannot bring a spelling about: either its characters are not
all there, or the markers are between them. (A template could still do it on purpose, by dropping single characters
in the middle; templates come with the model, messages do not.) Ordinary conversations carry no markers at all, so
templates that look for something in a message (``</think>``, say) find it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from shoal.errors import InvalidRequestError, UnsupportedModelError
from shoal.text.messages import normalize_messages
from shoal.text.sandbox import BoundedEnvironment

MAX_TEMPLATE_CHARS = 200_000
_PRIVATE_USE = range(0xE000, 0xF8FF)


class ChatTemplate:
    """A template with the control tokens' spellings.

    control_texts: spellings that count as control tokens in the template's own text. now: for ``strftime_now``.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        control_texts: Iterable[str] = (),
        now: Callable[[], datetime] = datetime.now,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise UnsupportedModelError(
                f"the chat template has {len(source)} characters, more than {MAX_TEMPLATE_CHARS}"
            )
        self.source = source
        self._constants = {"bos_token": bos_token, "eos_token": eos_token}
        self._controls = tuple(sorted({text for text in control_texts if text}))
        self._now = now
        self._clock = clock
        try:
            # Compiling takes ten times as long as rendering; the code knows nothing of the environment it will run in.
            self._code = self._environment().compile(source)
        except TemplateSyntaxError as error:
            raise UnsupportedModelError(f"the chat template is not Jinja: line {error.lineno}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[tuple[str, bool]]:
        """(text, whether control tokens count in it) in a row, for ``Tokenizer.encode_segments``.

        continue_final_message: the last message, the assistant's, is left open for the model to go on with; white
        space at its end is dropped. InvalidRequestError for wrong messages or a template that refuses them.
        """
        checked = normalize_messages(messages)
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequestError("add_generation_prompt", "must be off to continue the final message")
            if not checked or checked[-1]["role"] != "assistant":
                raise InvalidRequestError("continue_final_message", "the last message must be the assistant's")
        given = json.dumps([checked, tools], ensure_ascii=False, default=str)
        marker = _unused_character(self.source + given)
        guard = _Guard(self._controls, marker, given)
        text = self._run(guard.protect(checked), add_generation_prompt, guard.protect(tools) if tools else None)
        if continue_final_message:
            text = _cut_after(text, guard.protect(checked[-1]["content"].rstrip()))
        return _segments(text, marker, self._controls)

    def _run(self, messages: Any, add_generation_prompt: bool, tools: Any) -> str:
        environment = self._environment()
        try:
            template = environment.template_class.from_code(environment, self._code, environment.make_globals(None))
            return template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=tools, **self._constants
            )
        except TemplateError as error:
            raise InvalidRequestError("messages", f"the model's chat template refuses them: {error}") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
            raise InvalidRequestError(
                "messages", f"the model's chat template fails on them: {type(error).__name__}: {error}"
            ) from error

    def _environment(self) -> BoundedEnvironment:
        environment = BoundedEnvironment(self._clock)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: self._now().strftime(form)
        environment.add_filter("tojson", _to_json)
        return environment


class _Guard:
    """Breaks up whatever could spell a control token, alone or together with neighbouring text."""

    def __init__(self, controls: tuple[str, ...], marker: str, everything: str) -> None:
        self._marker = marker
        # Whatever the case: a template may change it.
        self._needed = any(_is_subsequence(text.lower(), everything.lower()) for text in controls)
        marks = frozenset(char for text in controls for char in text if not char.isalnum() and char != " ")
        # A spelling without any mark is broken up after its first letter.
        letters = {text[0] for text in controls if not set(text) & marks}
        self._chars = marks | {case for letter in letters for case in (letter.lower(), letter.upper())}

    def protect(self, value: Any) -> Any:
        """The value with every string in it protected; keys are the caller's too."""
        if not self._needed:
            return value
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, Mapping):
            return {key: self.protect(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.protect(item) for item in value]
        return value

    def _protect_text(self, text: str) -> str:
        # A spelling such as <|im_end|> cannot be complete if each of its marks is followed by a marker, wherever the
        # rest of it comes from.
        return "".join(char + self._marker if char in self._chars else char for char in text)


def _is_subsequence(short: str, long: str) -> bool:
    """Whether the characters of ``short`` occur in ``long`` in order."""
    position = 0
    for char in short:
        position = long.find(char, position) + 1
        if not position:
            return False
    return True


def _unused_character(text: str) -> str:
    present = set(text)
    for code in _PRIVATE_USE:
        if chr(code) not in present:
            return chr(code)
    raise InvalidRequestError("messages", "use every private-use character of Unicode; leave one out")


def _cut_after(text: str, ending: str) -> str:
    position = text.rfind(ending)
    if position < 0:
        raise InvalidRequestError("continue_final_message", "the chat template does not show the last message's text")
    return text[: position + len(ending)]


def _segments(text: str, marker: str, controls: tuple[str, ...]) -> list[tuple[str, bool]]:
    """Real control tokens are whole in the text; everything between them is plain once the markers are gone."""
    from shoal.text.tokenizer import alternation

    pattern = alternation(controls)
    found: list[tuple[str, bool]] = []
    for number, piece in enumerate([text] if pattern is None else pattern.split(text)):
        if number % 2:
            found.append((piece, True))
        elif piece:
            found.append((piece.replace(marker, ""), False))
    return found


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
