"""Grammars of texts that are calls.

``required`` and a named tool mean a text that is nothing but calls; ``auto`` with a response format one that is either
calls or an answer in that format.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from shoal.core.grammar import GrammarKind, GrammarSpec
from shoal.tools.definitions import Tool
from shoal.tools.formats import CALL_CLOSE, CALL_OPEN, ToolFormat

# As in the JSON of a response format: white space is bounded, and a schema cannot change that from inside.
_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A]{1,24}", "lenient": False}


def calls_grammar(tools: Sequence[Tool], format: ToolFormat, *, parallel: bool) -> GrammarSpec:
    """One call of one of the tools, or, if parallel, one or more."""
    return _grammar(["start: calls", *_calls(tools, format, parallel=parallel)])


def calls_or_answer(tools: Sequence[Tool], format: ToolFormat, answer: GrammarSpec, *, parallel: bool) -> GrammarSpec:
    """The same, or a text that fits the JSON schema ``answer``."""
    lines = ["start: calls | answer", f"answer: %json {_schema(answer)}"]
    return _grammar([*lines, *_calls(tools, format, parallel=parallel)])


def _grammar(lines: Sequence[str]) -> GrammarSpec:
    return GrammarSpec(GrammarKind.LARK, "\n".join(lines) + "\n", "tools")


def _schema(spec: GrammarSpec) -> str:
    return json.dumps({**json.loads(spec.text), "x-guidance": _OPTIONS}, ensure_ascii=False)


def _calls(tools: Sequence[Tool], format: ToolFormat, *, parallel: bool) -> list[str]:
    names = " | ".join(f"call_{number}" for number in range(len(tools)))
    lines = [_rule(format, parallel=parallel), f"call: {names}"]
    for number, tool in enumerate(tools):
        head = json.dumps({"name": tool.name})[:-1] + f', "{format.arguments_key}": '
        lines.append(f'call_{number}: {json.dumps(head)} arguments_{number} "}}"')
        lines.append(f"arguments_{number}: %json {_schema(tool.parameters)}")
    return lines


def _rule(format: ToolFormat, *, parallel: bool) -> str:
    match format:
        case ToolFormat.HERMES:
            more = _more(r"\n", "tagged", parallel)
            return f'calls: tagged{more}\ntagged: "{CALL_OPEN}\\n" call "\\n{CALL_CLOSE}"'
        case ToolFormat.LLAMA3:
            return f"calls: call{_more('; ', 'call', parallel)}"
        case ToolFormat.MISTRAL:
            # Without the control token in front, which is no text; the parser takes a bare list as well.
            return f"""calls: "[" call{_more(", ", "call", parallel)} "]\""""


def _more(separator: str, rule: str, parallel: bool) -> str:
    return f' ("{separator}" {rule})*' if parallel else ""
