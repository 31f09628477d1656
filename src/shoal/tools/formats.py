"""How models write their calls, told from their chat templates.

=========  ===============================================================  =======================
format     a call                                                           used by
=========  ===============================================================  =======================
hermes     ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``     Hermes, Qwen, and Shoal's fallback
llama3     ``{"name": ..., "parameters": {...}}``, the whole text           Llama 3.1 and later
mistral    ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``         Mistral
=========  ===============================================================  =======================
"""

from __future__ import annotations

import re
from enum import StrEnum


class ToolFormat(StrEnum):
    """A way of writing calls."""

    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"

    @property
    def arguments_key(self) -> str:
        """What the arguments are called."""
        return "parameters" if self is ToolFormat.LLAMA3 else "arguments"


CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
MISTRAL_OPEN = "[TOOL_CALLS]"
PYTHON_TAG = "<|python_tag|>"


def choose_format(template: str | None) -> ToolFormat:
    """The format that a chat template's source shows; the fallback's when it shows none."""
    if template is None or CALL_OPEN in template:
        return ToolFormat.HERMES
    if MISTRAL_OPEN in template:
        return ToolFormat.MISTRAL
    if PYTHON_TAG in template or re.search(r"Environment: ipython", template):
        return ToolFormat.LLAMA3
    return ToolFormat.HERMES


def shows_tools(template: str | None) -> bool:
    """Whether a template puts tools into the prompt itself."""
    return template is not None and re.search(r"\btools\b", template) is not None


def shows_calls(template: str | None) -> bool:
    """Whether a template renders an assistant's past calls."""
    return template is not None and re.search(r"\btool_calls\b", template) is not None


def shows_results(template: str | None) -> bool:
    """Whether a template knows messages of the role ``tool``."""
    return template is not None and re.search(r"""["']tool["']""", template) is not None
