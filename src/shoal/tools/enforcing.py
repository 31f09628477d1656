"""The grammar of a text that is nothing but calls: what ``required`` and a named tool mean."""

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
    names = " | ".join(f"call_{number}" for number in range(len(tools)))
    lines = [_start(format, parallel=parallel), f"call: {names}"]
    for number, tool in enumerate(tools):
        head = json.dumps({"name": tool.name})[:-1] + f', "{format.arguments_key}": '
        schema = {**json.loads(tool.parameters.text), "x-guidance": _OPTIONS}
        lines.append(f'call_{number}: {json.dumps(head)} arguments_{number} "}}"')
        lines.append(f"arguments_{number}: %json {json.dumps(schema, ensure_ascii=False)}")
    return GrammarSpec(GrammarKind.LARK, "\n".join(lines) + "\n", "tools")


def _start(format: ToolFormat, *, parallel: bool) -> str:
    match format:
        case ToolFormat.HERMES:
            more = _more(r"\n", "tagged", parallel)
            return f'start: tagged{more}\ntagged: "{CALL_OPEN}\\n" call "\\n{CALL_CLOSE}"'
        case ToolFormat.LLAMA3:
            return f"start: call{_more('; ', 'call', parallel)}"
        case ToolFormat.MISTRAL:
            # Without the control token in front, which is no text; the parser takes a bare list as well.
            return f"""start: "[" call{_more(", ", "call", parallel)} "]\""""


def _more(separator: str, rule: str, parallel: bool) -> str:
    return f' ("{separator}" {rule})*' if parallel else ""
