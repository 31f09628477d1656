"""A Jinja environment for templates out of model files, which nobody here has read.

The library's immutable sandbox keeps a template from reaching Python's internals. It does not keep one from running
for ever or filling the memory, so three things are bounded here:

- **steps**: every statement the template executes costs one, counted by calls that are woven into its syntax tree;
  so no loop, however nested, and no recursion runs on and on;
- **sizes**: operators, filters and methods that can make something large out of something small (repetition,
  powers, widths, joining, replacing, formatting) look at their arguments first; strings glued together or captured
  are measured as they grow;
- **time**: the step counter also looks at a clock, as a last resort against what the other two let through.

Going over a bound is a TemplateBoundError.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sized
from typing import Any

from jinja2 import Environment, nodes
from jinja2.exceptions import SecurityError
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 50_000
MAX_SECONDS = 5.0
MAX_CHARS = 8_000_000
MAX_ITEMS = 100_000
MAX_NUMBER = 10**18
MAX_WIDTH = 10_000

_TICK, _GLUE = "_shoal_tick", "_shoal_glue"
_WIDTH = re.compile(r"\d{5,}")


class TemplateBoundError(SecurityError):
    """A template wants more than it may have."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """One rendering's environment: the counters start when it is made."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], finalize=_check_shown
        )
        self._clock = clock
        self._deadline = clock() + MAX_SECONDS
        self._steps = 0
        self.concat = self._concat  # type: ignore[method-assign]  # how the library joins output and captures
        self.globals[_TICK] = self._tick
        self.globals[_GLUE] = self._glue
        self.globals["range"] = _bounded_range
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name, None)
        self.filters = {name: _bounded_filter(name, function) for name, function in self.filters.items()}

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """A filter of ours, under the same bounds as the library's."""
        self.filters[name] = _bounded_filter(name, function)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator whose result may be larger than its operands."""
        if operator == "*":
            _check_repetition(left, right)
            _check_repetition(right, left)
        elif operator == "**":
            if not (isinstance(left, (int, float)) and isinstance(right, (int, float)) and abs(right) <= 64):
                raise TemplateBoundError("a power is too large")
        elif operator == "%" and isinstance(left, str):
            _check_widths(left)
            _check_product([left, *(right if isinstance(right, tuple) else (right,))])
        result = super().call_binop(context, operator, left, right)
        _check_result(result)
        return result

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A function, macro or method."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_arguments([owner, *args, *kwargs.values()])
            if __obj.__name__ in ("format", "format_map"):
                _check_widths(owner)
        result = super().call(__context, __obj, *args, **kwargs)
        _check_result(result)
        return result

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Weaver().visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]

    def _tick(self) -> str:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise TemplateBoundError(f"the template takes more than {MAX_STEPS} steps")
        if self._steps % 64 == 0 and self._clock() > self._deadline:
            raise TemplateBoundError(f"the template takes more than {MAX_SECONDS:g} seconds")
        return ""

    def _concat(self, pieces: Iterable[str]) -> str:
        kept: list[str] = []
        size = 0
        for piece in pieces:
            size += len(piece)
            if size > MAX_CHARS:
                raise TemplateBoundError(f"the template makes more than {MAX_CHARS} characters")
            kept.append(piece)
        return "".join(kept)

    def _glue(self, *values: Any) -> str:
        return self._concat(str(_check_shown(value)) for value in values)


class _Weaver(NodeTransformer):
    """Puts a tick before every statement, and makes a measured call of every ``a ~ b``."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        for field in ("body", "else_"):
            statements = getattr(node, field, None)
            # A template's own top level holds declarations (blocks, extends) that must stay where they are.
            if isinstance(statements, list) and all(isinstance(item, nodes.Stmt) for item in statements):
                setattr(node, field, [woven for item in statements for woven in (_tick_node(item.lineno), item)])
        # A loop costs something even if its body is empty.
        if isinstance(node, nodes.For) and not node.body:
            node.body = [_tick_node(node.lineno)]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - named by the library
        self.generic_visit(node)
        call = nodes.Call(nodes.Name(_GLUE, "load"), node.nodes, [], None, None)
        return call.set_lineno(node.lineno)


def _tick_node(lineno: int) -> nodes.Stmt:
    call = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
    return nodes.ExprStmt(call).set_lineno(lineno)  # type: ignore[return-value]


def _bounded_range(*args: int) -> range:
    found = range(*args)
    if len(found) > MAX_ITEMS:
        raise TemplateBoundError(f"a range has more than {MAX_ITEMS} items")
    return found


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if name == "format":
            _check_widths(str(args[0]))
        # A lazy filter's input (a generator) has no size yet; it is bounded by what it was made of.
        _check_arguments([*args, *kwargs.values()])
        result = function(*args, **kwargs)
        _check_result(result)
        return result

    # The library reads from these whether to pass the context or the environment.
    run.__dict__.update(getattr(function, "__dict__", {}))
    return run


def _check_arguments(values: list[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH and not isinstance(value, bool):
            raise TemplateBoundError(f"the number {value} is too large for an argument")
    _check_product(values)


def _check_product(values: list[Any]) -> None:
    """The two largest arguments together bound what joining, replacing or formatting can make of them."""
    sizes = sorted((_size(value) for value in values), reverse=True)
    if len(sizes) > 1 and sizes[0] * sizes[1] > 64 * MAX_CHARS:
        raise TemplateBoundError("the arguments of a filter or method are too large together")
    if sizes and sizes[0] > MAX_CHARS:
        raise TemplateBoundError("an argument is too large")


def _check_shown(value: Any) -> Any:
    """The value, if writing it out is affordable: a list that holds another twice doubles what it shows."""
    _size(value)
    return value


def _size(value: Any) -> int:
    # What the library passes to filters on its own account (context, environment) is not the template's doing.
    if isinstance(value, (Context, Environment, EvalContext)):
        return 1
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return _deep_size(value)
    return len(value) if isinstance(value, Sized) else 1


def _deep_size(value: Any) -> int:
    """Items and characters of a nest of containers, each counted as often as it would be shown."""
    size = 0
    pending = [value]
    while pending:
        item = pending.pop()
        size += 16  # an item costs more than a character
        if isinstance(item, (str, bytes)):
            size += len(item)
        elif isinstance(item, dict):
            pending.extend(item)
            pending.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            pending.extend(item)
        if size + len(pending) > MAX_CHARS:
            raise TemplateBoundError(f"a nest of lists holds more than {MAX_CHARS} items and characters")
    return size


def _check_repetition(value: Any, times: Any) -> None:
    if isinstance(value, (str, bytes, list, tuple)) and isinstance(times, int) and len(value) * times > MAX_ITEMS:
        raise TemplateBoundError(f"a repetition has more than {MAX_ITEMS} items")


def _check_widths(text: str) -> None:
    if _WIDTH.search(text):
        raise TemplateBoundError("a width in a format is too large")


def _check_result(value: Any) -> None:
    if isinstance(value, (str, bytes)) and len(value) > MAX_CHARS:
        raise TemplateBoundError(f"a text has more than {MAX_CHARS} characters")
    if isinstance(value, (list, tuple)) and len(value) > MAX_ITEMS:
        raise TemplateBoundError(f"a list has more than {MAX_ITEMS} items")
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        raise TemplateBoundError("a number is too large")
