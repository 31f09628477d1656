"""Generated text, piece by piece, to content and tool calls.

What comes out depends on the text only, not on how it was cut into pieces. Text that may be the beginning of a call is
held back until it is certain. A call that turns out malformed (broken JSON, a name that is no tool, another text where
its closing tag should be) is content, character for character; nothing is lost but white space around calls and the
syntax of calls themselves.

A call whose text was held to a grammar is ``trusted``: its name comes as soon as it stands there and its arguments as
they are generated. Otherwise a call comes out at its end, when it is known to be one.

A reader holds at most one block, which is all of a call or of a list of calls, from its opener on. The brackets of its
objects are counted as characters come; an object is parsed once, when its brackets balance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, NoReturn

from shoal.tools.formats import CALL_CLOSE, CALL_OPEN, MISTRAL_OPEN, PYTHON_TAG, ToolFormat

_BLANK = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = frozenset({"id", "type"})
_HEADER = re.compile(r'\{\s*"name"\s*:\s*"([a-zA-Z0-9_-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_BRACKETS = re.compile(r'["\\{}\[\]]')


class ContentDelta(NamedTuple):
    """More of the message's content."""

    text: str


class ToolCallDelta(NamedTuple):
    """More of a call: its first delta has id and name, the others only pieces of ``arguments``."""

    index: int  # type: ignore[assignment]  # which of the message's calls; hides tuple.index
    id: str | None
    name: str | None
    arguments: str


Delta = ContentDelta | ToolCallDelta


class _Stage(Enum):
    TEXT = "outside of calls"
    LIST = "a list of calls must begin"
    OBJECT = "a call must begin"
    INSIDE = "inside a call's object"
    AFTER = "behind a call's object"


class ToolCallParser:
    """One completion's text.

    names: the tools that exist. trusted: the text was held to a grammar of calls. max_calls: what comes after so many
    is content; None is no limit. new_id: gives an id for each call.
    """

    def __init__(
        self,
        format: ToolFormat,
        names: frozenset[str],
        *,
        trusted: bool = False,
        max_calls: int | None = None,
        new_id: Callable[[], str],
    ) -> None:
        self._format = format
        self._names = names
        self._trusted = trusted
        self._max_calls = max_calls
        self._new_id = new_id
        self.num_calls = 0  # given out so far
        self._out: list[Delta] = []
        self._buffer = ""  # not given out: held text, or a block from its opener on
        self._space = ""  # white space that is content only if something other than a call follows
        self._call_last = False
        self._at_start = True  # nothing but white space so far
        self._final = False
        self._stage = _Stage.TEXT
        self._opener = 0  # its length
        self._at = 0  # everything before is understood
        self._object = _Brackets(0)
        self._good = 0  # where the block's last complete call ends
        self._found: list[tuple[str, str]] = []  # complete calls of the block that are not given out
        self._begun: _Brackets | None = None  # the arguments of a trusted call that is being given out

    def push(self, text: str) -> list[Delta]:
        """What is certain now."""
        self._buffer += text
        return self._run()

    def finish(self) -> list[Delta]:
        """The rest; nothing may be pushed afterwards."""
        self._final = True
        deltas = self._run()
        if self._space and not self._call_last:
            deltas.append(ContentDelta(self._space))
        self._space = ""
        return _joined(deltas)

    def _run(self) -> list[Delta]:
        while self._buffer and self._step():
            pass
        deltas, self._out = self._out, []
        return _joined(deltas)

    def _step(self) -> bool:
        """Understand a little more; False when that needs more text."""
        match self._stage:
            case _Stage.TEXT:
                return self._text()
            case _Stage.LIST:
                return self._expect("[", _Stage.OBJECT)
            case _Stage.OBJECT:
                return self._expect("{", _Stage.INSIDE)
            case _Stage.INSIDE:
                return self._inside()
            case _Stage.AFTER:
                return self._after()

    # Outside.

    def _text(self) -> bool:
        if self._max_calls is not None and self.num_calls >= self._max_calls:
            return self._give_content(len(self._buffer))
        if self._at_start and (decided := self._start()) is not None:
            return decided
        if self._format is ToolFormat.LLAMA3:
            return self._give_content(len(self._buffer))
        opener = CALL_OPEN if self._format is ToolFormat.HERMES else MISTRAL_OPEN
        position = self._buffer.find(opener)
        if position >= 0:
            self._give_content(position)
            return self._open(len(opener))
        return self._give_content(len(self._buffer) - (0 if self._final else _beginning(self._buffer, opener)))

    def _start(self) -> bool | None:
        """Openers that count only in front of everything. None: there is none, go on as in any other place."""
        text = self._buffer.lstrip(_BLANK)
        blank = len(self._buffer) - len(text)
        if self._format is ToolFormat.LLAMA3:
            if text.startswith(("{", PYTHON_TAG)):
                self._give_content(blank)
                return self._open(0 if text[0] == "{" else len(PYTHON_TAG))
            waits = PYTHON_TAG.startswith(text)
        elif self._format is ToolFormat.MISTRAL:
            if re.match(r"\[[ \t\r\n]*\{", text):
                self._give_content(blank)
                return self._open(0)
            waits = MISTRAL_OPEN.startswith(text) or re.fullmatch(r"\[[ \t\r\n]*", text) is not None
        else:
            waits = False
        if waits and not self._final:
            return False
        self._at_start = not text
        return None

    def _open(self, opener: int) -> bool:
        self._at_start = False
        self._opener = self._at = self._good = opener
        self._stage = _Stage.LIST if self._format is ToolFormat.MISTRAL else _Stage.OBJECT
        return True

    # Inside a block.

    def _expect(self, bracket: str, then: _Stage) -> bool:
        self._skip_blank()
        if self._at == len(self._buffer):
            return self._wait()
        if self._buffer[self._at] != bracket:
            return self._refuse()
        if then is _Stage.INSIDE:
            self._object = _Brackets(self._at)
        else:
            self._at += 1
        self._stage = then
        return True

    def _inside(self) -> bool:
        end = self._object.scan(self._buffer)
        if self._trusted:
            self._stream()
        if end is None:
            return self._wait()
        call = _parse_call(self._buffer[self._object.start : end], self._names)
        if call is None:
            return self._refuse()
        if self._begun is None:
            self._found.append(call)
        self._begun = None
        self._at = self._good = end
        self._stage = _Stage.AFTER
        return True

    def _stream(self) -> None:
        """Give out what is certain of a trusted call."""
        if self._begun is None:
            header = _HEADER.match(self._buffer, self._object.start)
            if header is None or header[1] not in self._names:
                return
            self._give_calls()
            self._header(header[1])
            self._begun = _Brackets(header.end())
        before, done = self._begun.position, self._begun.done
        end = self._begun.scan(self._buffer)
        if not done and (piece := self._buffer[before : len(self._buffer) if end is None else end]):
            self._out.append(ToolCallDelta(self.num_calls - 1, None, None, piece))

    def _after(self) -> bool:
        if self._trusted:
            self._give_calls()
        self._skip_blank()
        rest = self._buffer[self._at :]
        full = self._max_calls is not None and self.num_calls + len(self._found) >= self._max_calls
        if self._format is ToolFormat.HERMES:
            if rest.startswith(CALL_CLOSE):
                return self._close(self._at + len(CALL_CLOSE))
            if CALL_CLOSE.startswith(rest):
                # A model that ends its text instead of the call has still written all of it.
                return self._close(len(self._buffer)) if self._final else False
            return self._refuse()
        separator = "," if self._format is ToolFormat.MISTRAL else ";"
        if rest.startswith(separator) and not full:
            following = rest[1:].lstrip(_BLANK)
            if following.startswith("{") or (self._format is ToolFormat.MISTRAL and following):
                self._at += 1
                self._stage = _Stage.OBJECT
                return True
            if not following and not self._final:
                return False
        if self._format is ToolFormat.LLAMA3:
            return self._close(self._good) if rest or self._final else False
        if rest.startswith("]"):
            return self._close(self._at + 1)
        if full and rest:
            return self._close(self._good)
        return self._wait() if not rest else self._refuse()

    def _skip_blank(self) -> None:
        while self._at < len(self._buffer) and self._buffer[self._at] in _BLANK:
            self._at += 1

    def _wait(self) -> bool:
        """More text is needed; at the end of the text that makes the block what it is."""
        return self._refuse() if self._final else False

    def _refuse(self) -> bool:
        """The block is malformed: its calls that are out already stay so, everything else is content."""
        if self._begun is not None:  # cut off, or not what its grammar promised
            end = self._begun.position
            self._begun = None
            self._leave(len(self._buffer) if self._final else end)
        elif self._trusted and self._good > self._opener:
            self._leave(self._good)
        elif self._format is ToolFormat.LLAMA3 and self._found:
            self._close(self._good)
        else:
            self._found.clear()
            self._stage = _Stage.TEXT
            self._give_content(max(self._opener, 1))
        return True

    def _close(self, end: int) -> bool:
        self._give_calls()
        self._leave(end)
        return True

    def _leave(self, end: int) -> None:
        self._found.clear()
        self._buffer = self._buffer[end:]
        self._stage = _Stage.TEXT

    # Giving out.

    def _give_content(self, length: int) -> bool:
        """The first characters of the buffer as content; whether there were any."""
        text, self._buffer = self._space + self._buffer[:length], self._buffer[length:]
        shown = text.rstrip(_BLANK)
        self._space = text[len(shown) :]
        if shown:
            self._out.append(ContentDelta(shown))
            self._call_last = False
        return length > 0

    def _give_calls(self) -> None:
        for name, arguments in self._found:
            self._header(name)
            self._out.append(ToolCallDelta(self.num_calls - 1, None, None, arguments))
        self._found.clear()

    def _header(self, name: str) -> None:
        self._space = ""
        self._call_last = True
        self._out.append(ToolCallDelta(self.num_calls, self._new_id(), name, ""))
        self.num_calls += 1


class _Brackets:
    """Finds the end of the JSON object that begins at ``start``, looking at each character once."""

    __slots__ = ("_depth", "_escaped", "_string", "done", "position", "start")

    def __init__(self, start: int) -> None:
        self.start = self.position = start
        self.done = False
        self._depth = 0
        self._string = self._escaped = False

    def scan(self, text: str) -> int | None:
        """Where the object ends, once that is known."""
        while not self.done and self.position < len(text):
            if self._escaped:
                self._escaped = False
                self.position += 1
                continue
            found = _BRACKETS.search(text, self.position)
            if found is None:
                self.position = len(text)
                break
            self.position = found.end()
            self._see(found[0])
        return self.position if self.done else None

    def _see(self, char: str) -> None:
        if self._string:
            self._escaped = char == "\\"
            self._string = char != '"'
        elif char == '"':
            self._string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth <= 0


def _parse_call(text: str, names: frozenset[str]) -> tuple[str, str] | None:
    """A call's name and its arguments as they are written; None if it is not a call."""
    try:
        members = _members(text)
    except (ValueError, RecursionError):
        return None
    name = members.pop("name", (None, ""))[0]
    given = [members.pop(key) for key in _ARGUMENT_KEYS if key in members]
    if name not in names or len(given) != 1 or not isinstance(given[0][0], dict) or members.keys() - _OTHER_KEYS:
        return None
    return str(name), given[0][1]


def _members(text: str) -> dict[str, tuple[Any, str]]:
    """A JSON object's members as values and as written. ValueError if it is none, or names a member twice."""
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    members: dict[str, tuple[Any, str]] = {}
    position = 1
    while True:
        key, position = decoder.raw_decode(text, _blank(text, position))
        if not isinstance(key, str) or key in members:
            raise ValueError(key)
        position = _blank(text, position)
        if text[position : position + 1] != ":":
            raise ValueError(position)
        start = _blank(text, position + 1)
        value, end = decoder.raw_decode(text, start)
        members[key] = (value, text[start:end])
        position = _blank(text, end)
        separator = text[position : position + 1]
        position += 1
        if separator == "}" and position == len(text):
            return members
        if separator != ",":
            raise ValueError(position)


def _blank(text: str, position: int) -> int:
    while position < len(text) and text[position] in _BLANK:
        position += 1
    return position


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _beginning(text: str, word: str) -> int:
    """Length of the longest proper beginning of ``word`` that ``text`` ends with."""
    for length in range(min(len(word) - 1, len(text)), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0


def _joined(deltas: list[Delta]) -> list[Delta]:
    """Neighbours that belong together as one."""
    joined: list[Delta] = []
    for delta in deltas:
        before = joined[-1] if joined else None
        if isinstance(delta, ContentDelta) and isinstance(before, ContentDelta):
            joined[-1] = ContentDelta(before.text + delta.text)
        elif (
            isinstance(delta, ToolCallDelta)
            and isinstance(before, ToolCallDelta)
            and delta.index == before.index
            and delta.name is None
        ):
            joined[-1] = before._replace(arguments=before.arguments + delta.arguments)
        else:
            joined.append(delta)
    return joined
