from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.core.params import SamplingParams
from shoal.core.request import Request
from shoal.engine.request import EmptyResult, Limits, resolve
from shoal.errors import InvalidRequestError

LIMITS = Limits(context_length=32, vocab_size=100, pool_tokens=1000, max_waiting=8, eos_ids=frozenset({2}))


def ask(prompt: Any, limits: Limits = LIMITS, **params: Any) -> Request | EmptyResult:
    return resolve("r", prompt, SamplingParams(**params), limits)


def accepted(prompt: Any, limits: Limits = LIMITS, **params: Any) -> Request:
    request = ask(prompt, limits, **params)
    assert isinstance(request, Request)
    return request


@pytest.mark.parametrize(
    ("prompt", "part"),
    [
        ([], "empty"),
        ((), "empty"),
        ([100], "outside the vocabulary"),
        ([-1], "outside the vocabulary"),
        ([2**70], "outside the vocabulary"),
        ([True], "must be integers"),
        ([1.0], "must be integers"),
        (["1"], "must be integers"),
        ([None], "must be integers"),
        ("text", "token ids"),
        (b"bytes", "token ids"),
        (7, "token ids"),
    ],
)
def test_wrong_prompts_are_refused(prompt: Any, part: str) -> None:
    with pytest.raises(InvalidRequestError, match=part) as caught:
        ask(prompt)
    assert caught.value.field == "prompt"


def test_integers_of_other_types_become_ints() -> None:
    request = accepted(np.array([1, 99], dtype=np.int64))
    assert request.prompt_ids == (1, 99)
    assert all(type(token) is int for token in request.prompt_ids)


def test_the_context_length_at_one_under_and_one_over() -> None:
    assert accepted([1] * 31).max_tokens == 1
    with pytest.raises(InvalidRequestError, match="no room is left") as caught:
        ask([1] * 32)
    assert caught.value.field == "prompt"
    with pytest.raises(InvalidRequestError, match="has 33 tokens, but the context length is 32"):
        ask([1] * 33)


def test_max_tokens_zero_is_an_empty_result_but_still_checked() -> None:
    assert ask([1, 2], max_tokens=0, n=3) == EmptyResult(prompt_ids=(1, 2), n=3)
    assert ask([1] * 32, max_tokens=0) == EmptyResult(prompt_ids=(1,) * 32, n=1)
    with pytest.raises(InvalidRequestError, match="context length"):
        ask([1] * 33, max_tokens=0)
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        ask([100], max_tokens=0)


def test_max_tokens_is_kept_or_refused_never_clipped() -> None:
    assert accepted([1] * 10, max_tokens=22).max_tokens == 22
    with pytest.raises(InvalidRequestError, match="at most 22 fit") as caught:
        ask([1] * 10, max_tokens=23)
    assert caught.value.field == "max_tokens"
    assert accepted([1] * 10).max_tokens == 22


def test_what_can_never_fit_the_pool_is_refused() -> None:
    small = Limits(context_length=32, vocab_size=100, pool_tokens=16, max_waiting=8, eos_ids=frozenset())
    # The last token is not fed back: 16 places hold a sequence of 17.
    assert accepted([1] * 10, small).max_tokens == 7
    assert accepted([1] * 16, small).max_tokens == 1
    assert accepted([1] * 10, small, max_tokens=7).max_tokens == 7
    with pytest.raises(InvalidRequestError, match="at most 7 fit, or raise kv_tokens") as caught:
        ask([1] * 10, small, max_tokens=8)
    assert caught.value.field == "max_tokens"
    with pytest.raises(InvalidRequestError, match="KV cache holds 16") as caught:
        ask([1] * 17, small)
    assert caught.value.field == "prompt"


def test_more_completions_than_can_ever_wait_are_refused() -> None:
    assert accepted([1], n=8).params.n == 8
    with pytest.raises(InvalidRequestError, match="raise max_waiting") as caught:
        ask([1], n=9)
    assert caught.value.field == "n"


def test_min_tokens_must_fit_when_max_tokens_is_open() -> None:
    assert accepted([1] * 30, min_tokens=2).max_tokens == 2
    with pytest.raises(InvalidRequestError, match="only 2 tokens fit") as caught:
        ask([1] * 30, min_tokens=3)
    assert caught.value.field == "min_tokens"


@pytest.mark.parametrize(
    ("field", "params"), [("logit_bias", {"logit_bias": {100: 1.0}}), ("stop_token_ids", {"stop_token_ids": [100]})]
)
def test_parameters_about_unknown_tokens_are_refused(field: str, params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="outside the vocabulary") as caught:
        ask([1], **params)
    assert caught.value.field == field


def test_stop_ids_are_the_models_and_the_users() -> None:
    assert accepted([1], stop_token_ids=[7]).stop_ids == {2, 7}
    assert accepted([1], stop_token_ids=[7], ignore_eos=True).stop_ids == {7}


def test_seeds_are_taken_or_drawn() -> None:
    assert accepted([1], seed=5).seed == 5
    assert accepted([1], seed=-1).seed == 2**64 - 1
    drawn = {accepted([1]).seed for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed < 2**53 for seed in drawn)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("priority", {"priority": 1.5}),
        ("priority", {"priority": True}),
        ("deadline", {"deadline": float("nan")}),
        ("deadline", {"deadline": "soon"}),
        ("cache_salt", {"cache_salt": 3}),
    ],
)
def test_wrong_order_options_are_refused(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        resolve("r", [1], SamplingParams(), LIMITS, **options)
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_never_get_this_far(name: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match="finite") as caught:
        SamplingParams.from_mapping({name: value})
    assert caught.value.field == name


def test_unknown_options_name_themselves() -> None:
    with pytest.raises(InvalidRequestError, match="unknown") as caught:
        SamplingParams.from_mapping({"temprature": 1})
    assert caught.value.field == "temprature"


@pytest.mark.parametrize(
    "stop", [["x"] * 65, ["x" * 1025], [""], [None], 3], ids=["many", "long", "empty string", "no string", "no list"]
)
def test_wrong_stop_lists_are_refused(stop: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(stop=stop)
    assert caught.value.field == "stop"


def test_an_empty_stop_list_is_no_stop() -> None:
    assert SamplingParams(stop=[]).stop == ()
