"""All about tools of one request: checked, with the prompt, the constraint and the parser that follow from it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.grammar import GrammarSpec
from shoal.tools.definitions import Mode, Tool, ToolChoice, parse_parallel, parse_tool_choice, parse_tools
from shoal.tools.enforcing import calls_grammar, calls_or_answer
from shoal.tools.formats import ToolFormat, choose_format
from shoal.tools.parser import ToolCallParser
from shoal.tools.prompting import adapt_messages, template_tools


@dataclass(frozen=True, slots=True)
class ToolUse:
    """template: the source of the model's chat template, if it has one."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    parallel: bool
    format: ToolFormat
    template: str | None

    @property
    def shown(self) -> tuple[Tool, ...]:
        """The tools that the model learns of: with choice ``none`` there are none."""
        return () if self.choice.mode is Mode.NONE else self.tools

    def prompt(self, messages: object) -> tuple[Sequence[Mapping[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools for ``ChatTemplate.render``."""
        return adapt_messages(messages, self.template, self.shown), template_tools(self.template, self.shown)

    @property
    def constraint(self) -> GrammarSpec | None:
        """What an obligatory call is held to; goes into ``SamplingParams.grammar``. None leaves the text free."""
        callable_ = self._obligatory()
        # A named tool is called once, as OpenAI does.
        parallel = self.parallel and self.choice.name is None
        return calls_grammar(callable_, self.format, parallel=parallel) if callable_ else None

    def constraint_beside(self, answer: GrammarSpec) -> GrammarSpec:
        """What a text is held to that is to be calls, of whatever tools are shown, or fit a JSON schema."""
        return calls_or_answer(self.shown, self.format, answer, parallel=self.parallel)

    @property
    def schemas(self) -> tuple[GrammarSpec, ...]:
        """Schemas inside the constraint. Checked one by one beforehand, a bad one is named as the tool's."""
        return tuple(tool.parameters for tool in self._obligatory())

    def parser(self, new_id: Callable[[], str] | None = None) -> ToolCallParser | None:
        """For one completion; None when its text is content as it stands."""
        if not self.shown:
            return None
        return ToolCallParser(
            self.format,
            frozenset(tool.name for tool in self.shown),
            trusted=self.choice.mode is Mode.REQUIRED,
            max_calls=None if self.parallel and self.choice.name is None else 1,
            new_id=new_id or _random_id,
        )

    def _obligatory(self) -> tuple[Tool, ...]:
        if self.choice.mode is not Mode.REQUIRED:
            return ()
        return tuple(tool for tool in self.tools if self.choice.name in (None, tool.name))


def prepare_tools(
    *,
    tools: object = None,
    tool_choice: object = None,
    parallel_tool_calls: object = None,
    template: str | None,
    format: ToolFormat | None = None,
) -> ToolUse:
    """From a request's fields as they came; InvalidRequestError names the one that is wrong.

    format: overrides what the template shows.
    """
    parsed = parse_tools(tools)
    return ToolUse(
        parsed,
        parse_tool_choice(tool_choice, parsed),
        parse_parallel(parallel_tool_calls),
        format or choose_format(template),
        template,
    )


def _random_id() -> str:
    return f"call_{secrets.token_hex(12)}"
