"""Random JSON schemas, and completions held to a constraint on the null backend."""

from __future__ import annotations

from typing import Any

from engine_support import make_loaded
from hypothesis import strategies as st

from shoal.core.params import SamplingParams
from shoal.engine.llm import LLM
from shoal.engine.outputs import CompletionOutput

KEYS = st.sampled_from(["a", "b", "é", "日本", "with space", 'quo"te', "back\\slash", "<|end|>"])
SMALL = st.integers(0, 4)
LITERALS = st.sampled_from(["é", "x", 1, None, True, 'a"b', "😀", "line\n"])


def _bounded(kind: str, low: int, span: int) -> dict[str, Any]:
    return {"type": kind, "minimum": low, "maximum": low + span}


SCALARS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "number"}, {"type": "integer"}]),
    st.builds(_bounded, st.sampled_from(["integer", "number"]), st.integers(-99, 99), st.integers(1, 50)),
    st.builds(lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, SMALL, SMALL),
    st.builds(lambda items: {"enum": items}, st.lists(LITERALS, min_size=1, unique_by=str)),
    st.builds(lambda item: {"const": item}, st.sampled_from(["é\n", 7, False, [1, "x"], {"k": None}])),
    st.sampled_from([{"type": "string", "pattern": "^[a-c]{2,4}$"}, {"type": ["string", "null"], "maxLength": 3}]),
    st.just({"type": "string", "format": "date"}),
)


def _object(properties: dict[str, Any], optional: frozenset[str], strict: bool) -> dict[str, Any]:
    required = [key for key in properties if strict or key not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.builds(_object, st.dictionaries(KEYS, inner, max_size=3), st.frozensets(KEYS), st.booleans()),
        st.builds(
            lambda item, low, more: {"type": "array", "items": item, "minItems": low, "maxItems": low + more},
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
    )


SCHEMAS = st.recursive(SCALARS, _nested, max_leaves=5)
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def json_schema(schema: object, *, strict: bool | None = True) -> dict[str, Any]:
    """A response format."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": strict}}


def complete(params: SamplingParams, **options: Any) -> list[CompletionOutput]:
    """The completions of a short prompt."""
    with LLM.from_loaded(make_loaded(context_length=2048, blocks=512, **options)) as llm:
        return list(llm.generate("go", params)[0].completions)
