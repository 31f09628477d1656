"""Constrained completions end to end on the null backend: they fit, they end, and they are the same in any company."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from engine_support import EOS, VOCAB, Recorder, byte_tokenizer, make_engine, make_loaded, make_request, run_until_idle
from grammar_support import SCHEMAS, TREE, complete, json_schema
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.backends.null import Fault, NullBackend
from shoal.core.grammar import MAX_GRAMMAR_BYTES, GrammarKind, GrammarSpec
from shoal.core.params import SamplingParams
from shoal.core.plan import CacheShape
from shoal.core.request import FinishReason
from shoal.engine.llm import LLM
from shoal.engine.messages import Submit
from shoal.engine.outputs import CompletionOutput
from shoal.errors import InvalidRequestError
from shoal.grammar.compiler import WHITE_SPACE, GrammarCompiler
from shoal.grammar.vocabulary import Vocabulary

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def check_json(output: CompletionOutput, schema: object) -> bool:
    """Whether the text ended; a text that did is JSON that fits."""
    assert output.error is None
    assert output.finish_reason in (STOP, LENGTH)
    if output.finish_reason is LENGTH:
        return False
    value = json.loads(output.text)
    jsonschema.Draft202012Validator(schema).validate(value)  # type: ignore[arg-type]
    return True


@settings(deadline=None, max_examples=60)
@given(SCHEMAS, st.integers(0, 2**32), st.booleans())
def test_texts_fit_their_schema(schema: dict[str, Any], seed: int, strict: bool) -> None:
    params = SamplingParams(response_format=json_schema(schema, strict=strict), seed=seed, n=4, max_tokens=400)
    try:
        outputs = complete(params)
    except InvalidRequestError:
        return  # the few combinations that the library cannot join; never a wrong text instead
    ended = [check_json(output, schema) for output in outputs]
    assert any(ended)


@pytest.mark.parametrize("seed", range(5))
def test_recursion_works(seed: int) -> None:
    outputs = complete(SamplingParams(response_format=json_schema(TREE), seed=seed, n=4, max_tokens=400))
    assert all(check_json(output, TREE) for output in outputs)


def test_any_object() -> None:
    outputs = complete(SamplingParams(response_format={"type": "json_object"}, seed=1, n=8, max_tokens=500))
    ended = [output for output in outputs if check_json(output, {"type": "object"})]
    assert len(ended) >= 6


@pytest.mark.parametrize("pattern", ["[a-z]{3}", "(yes|no)", "é+", r"\d{3}-\d{4}", "a*b"])
def test_texts_match_their_regex(pattern: str) -> None:
    for output in complete(SamplingParams(regex=pattern, seed=2, n=4, max_tokens=100)):
        assert output.finish_reason is STOP
        assert re.fullmatch(pattern, output.text)


def test_texts_follow_their_grammar() -> None:
    lark = 'start: "(" start ")" | digit+\ndigit: /[0-9]/\n'
    for output in complete(SamplingParams(grammar=lark, seed=3, n=6, max_tokens=200)):
        if output.finish_reason is STOP:
            assert re.fullmatch(r"(\(*)\d+(\)*)", output.text)
            assert output.text.count("(") == output.text.count(")")


def test_a_text_that_can_only_end_ends_at_once() -> None:
    (output,) = complete(SamplingParams(regex="abc", max_tokens=10))
    assert (output.text, output.token_ids, output.finish_reason) == ("abc", tuple(b"abc"), STOP)
    # Even where it is cut anyway, without an end-of-sequence token, and before min_tokens.
    for more in ({"max_tokens": 3}, {"ignore_eos": True}, {"min_tokens": 5}):
        (output,) = complete(SamplingParams(regex="abc", **{"max_tokens": 10, **more}))  # type: ignore[arg-type]
        assert (output.text, output.finish_reason) == ("abc", STOP)


def test_a_cut_text_says_so() -> None:
    (output,) = complete(SamplingParams(regex="[a-z]{10}", max_tokens=4))
    assert (len(output.text), output.finish_reason) == (4, LENGTH)


def test_a_stop_token_comes_only_where_the_text_may_end() -> None:
    params = SamplingParams(regex="(ab){2,}", stop_token_ids=(ord("z"),), seed=0, n=8, max_tokens=60)
    for output in complete(params):
        assert output.finish_reason is STOP
        assert output.token_ids[-1] in (EOS, ord("z"))
        assert re.fullmatch("(ab){2,}", output.text)


def test_min_tokens_hold_where_the_grammar_can_go_on() -> None:
    for output in complete(SamplingParams(regex="a+", min_tokens=7, seed=0, n=8, max_tokens=60)):
        assert len(output.text) >= 7


def test_white_space_is_bounded() -> None:
    # A model that loves spaces gets no further than the bound at any one place.
    (output,) = complete(
        SamplingParams(
            response_format=json_schema({"type": "array", "items": {"const": 1}, "maxItems": 2}), max_tokens=200
        ),
        script=" ",
    )
    assert output.finish_reason is STOP
    assert max(len(run) for run in re.findall(r"\s*", output.text)) == int(re.findall(r"\d+", WHITE_SPACE)[-1])


def test_a_schema_cannot_loosen_white_space() -> None:
    schema = {"const": [1], "x-guidance": {"whitespace_pattern": r"\s+"}}
    (output,) = complete(SamplingParams(response_format=json_schema(schema), max_tokens=300), script=" ")
    assert output.finish_reason is STOP


def test_nothing_left_fails_alone() -> None:
    dead_end = SamplingParams(regex="ab", stop_token_ids=(ord("b"),), max_tokens=5)
    with LLM.from_loaded(make_loaded()) as llm:
        free, constrained = llm.generate(["x", "y"], [SamplingParams(seed=1, max_tokens=5), dead_end])
    assert free.completions[0].error is None
    (output,) = constrained.completions
    assert output.error is not None
    assert "allows none" in output.error


PROMPT = tuple(b"a prompt")
REQUESTS: dict[str, dict[str, Any]] = {
    "free": {"seed": 1},
    "regex": {"seed": 2, "regex": "[a-z ]{5,30}"},
    "object": {"seed": 3, "response_format": {"type": "json_object"}},
    "tree": {"seed": 4, "response_format": json_schema(TREE)},
    "twice": {"seed": 5, "regex": r"\d+(\.\d+)?", "n": 3, "presence_penalty": 0.5},
    "greedy": {"response_format": json_schema(TREE)},
}
Results = dict[tuple[str, int], tuple[tuple[int, ...], str, FinishReason | None]]


def run_all(names: list[str], **options: Any) -> tuple[Results, int]:
    engine, recorder = make_engine(**options), Recorder()
    for name in names:
        request = make_request(name, prompt=PROMPT, max_tokens=60, **REQUESTS[name])
        engine.inbox.submit(Submit(request, recorder, 0.0))
    run_until_idle(engine)
    found = {
        (name, index): recorder.result(name, index) for name in names for index in range(REQUESTS[name].get("n", 1))
    }
    return found, engine.stats.scheduler.preemptions


@pytest.fixture(scope="module")
def alone() -> Results:
    found: Results = {}
    for name in REQUESTS:
        found |= run_all([name])[0]
    return found


def test_a_batch_gives_what_each_gives_alone(alone: Results) -> None:
    assert run_all(list(REQUESTS))[0] == alone
    assert run_all(list(REQUESTS), token_budget=3)[0] == alone


def test_preempted_gives_what_undisturbed_gives(alone: Results) -> None:
    for caching in (True, False):
        found, preemptions = run_all(list(REQUESTS), blocks=9, prefix_caching=caching, max_num_seqs=8)
        assert preemptions > 0
        assert found == alone


def test_a_step_that_runs_again_gives_the_same(alone: Results) -> None:
    fault = Fault(request_id="free", kind="raise", after=4, times=1)
    assert run_all(list(REQUESTS), faults=(fault,))[0] == alone


def test_nothing_is_remembered_of_ended_sequences() -> None:
    engine, recorder = make_engine(), Recorder()
    engine.inbox.submit(Submit(make_request("r", regex="[a-z]{4}"), recorder, 0.0))
    run_until_idle(engine)
    assert len(engine._backend._grammars) == 0  # type: ignore[attr-defined]


# What is refused.

SCHEMA_FIELD = "response_format.json_schema.schema"


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("field", "given_"),
    [
        ("response_format", {"response_format": "json"}),
        ("response_format.type", {"response_format": {"type": "yaml"}}),
        ("response_format.schema", {"response_format": {"type": "json_object", "schema": {}}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        (
            "response_format.json_schema.name",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        ),
        (SCHEMA_FIELD, {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}),
        ("response_format.json_schema.strict", {"response_format": json_schema({}, strict=1)}),  # type: ignore[arg-type]
        (SCHEMA_FIELD, {"response_format": json_schema("x")}),
        (SCHEMA_FIELD, {"response_format": json_schema(False)}),
        (SCHEMA_FIELD, {"response_format": json_schema({"const": float("nan")})}),
        (SCHEMA_FIELD, {"response_format": json_schema(deep(100_000))}),
        (SCHEMA_FIELD, {"response_format": json_schema({"enum": ["x" * MAX_GRAMMAR_BYTES]})}),
        ("regex", {"regex": 1}),
        ("regex", {"regex": ""}),
        ("regex", {"regex": "\ud800"}),
        ("regex", {"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}),
        ("regex", {"regex": "a", "response_format": {"type": "json_object"}}),
        ("grammar", {"grammar": 'start: "a"', "regex": "a"}),
    ],
)
def test_the_shape_is_checked_without_a_model(field: str, given_: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**given_)
    assert caught.value.field == field
    assert len(str(caught.value)) < 1000


COMPILER = GrammarCompiler(lambda: Vocabulary(byte_tokenizer().plain_bytes(), byte_tokenizer().encode_fragment), VOCAB)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec(GrammarKind.REGEX, "a("),
        GrammarSpec(GrammarKind.REGEX, "(?=look)ahead"),
        GrammarSpec(GrammarKind.LARK, "start: nothing"),
        GrammarSpec(GrammarKind.LARK, "start: <|end|>"),
        GrammarSpec(GrammarKind.LARK, "start: <[256]>"),
        GrammarSpec(GrammarKind.JSON_SCHEMA, '{"not": {"type": "string"}}'),
        GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}'),
        GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "strong"}'),
        GrammarSpec(GrammarKind.JSON_SCHEMA, '{"$ref": "https://example.org/schema"}'),
        GrammarSpec(GrammarKind.JSON_SCHEMA, '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'),
        GrammarSpec(GrammarKind.JSON_SCHEMA, '{"allOf": [{"type": "string"}, {"type": "integer"}]}'),
        GrammarSpec(GrammarKind.JSON_SCHEMA, '{"lenient": true, "not": {}, "x-guidance": {"lenient": true}}'),
    ],
)
def test_what_cannot_be_honoured_is_refused(spec: GrammarSpec) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        COMPILER.start(spec)
    assert caught.value.field == "grammar"
    assert len(str(caught.value)) < 500


def test_a_format_of_text_constrains_nothing() -> None:
    assert SamplingParams(response_format={"type": "text"}).constraint is None
    assert SamplingParams(response_format={"type": "text"}, regex="a").constraint is not None


def test_a_backend_without_a_vocabulary_refuses() -> None:
    backend = NullBackend(CacheShape(1, 16, 1, 1, 16, "f32"), 10, 10)
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        backend.check_grammar(GrammarSpec(GrammarKind.REGEX, "a"))
