from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
from engine_support import EOS, make_loaded, text_of

from shoal import LLM, SamplingParams, ShoalError
from shoal.backends.null import Fault
from shoal.core.request import FinishReason
from shoal.errors import (
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
)


def make_llm(**options: Any) -> LLM:
    return LLM.from_loaded(make_loaded(**options))


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 5, **options})


def test_results_come_in_order_with_usage_timings_and_seed() -> None:
    with make_llm() as llm:
        prompts = [[1 + i] * (1 + i) for i in range(10)]
        outputs = llm.generate(prompts, [params(max_tokens=12 - i, seed=i) for i in range(10)])
    for index, output in enumerate(outputs):
        assert list(output.prompt_ids) == prompts[index]
        (completion,) = output.completions
        assert len(completion.token_ids) == 12 - index
        assert completion.text == text_of(completion.token_ids)
        assert (completion.finish_reason, completion.error) == (FinishReason.LENGTH, None)
        assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (1 + index, 12 - index)
        assert output.seed == index
        timings = output.timings
        assert timings is not None
        assert timings.queue is not None
        assert timings.ttft is not None
        assert 0 <= timings.queue <= timings.ttft <= timings.total
        assert len(timings.itl) == 11 - index


def test_every_kind_of_prompt_alone_and_mixed() -> None:
    messages = [{"role": "user", "content": "hi"}]
    with make_llm() as llm:
        kinds: list[Any] = ["hi", [1, 2, 3], messages]
        mixed = llm.generate(kinds, params())
        for prompt, output in zip(kinds, mixed, strict=True):
            (single,) = llm.generate(prompt, params())
            assert single.prompt_ids == output.prompt_ids == llm.encode(prompt)
            assert single.completions == output.completions
        assert mixed[1].prompt_ids == (1, 2, 3)
        assert len({output.prompt_ids for output in mixed}) == 3
        assert llm.chat(messages, params()).completions == mixed[2].completions


def test_no_prompts_are_no_results() -> None:
    with make_llm() as llm:
        assert llm.generate([]) == []


@pytest.mark.parametrize("prompts", [None, 3, b"bytes", {"role": "user"}, ["fine", 3], ["fine", None], ["fine", b"x"]])
def test_what_is_not_a_prompt_is_refused_at_once(prompts: Any) -> None:
    with make_llm() as llm, pytest.raises(InvalidRequestError) as caught:
        llm.generate(prompts)
    assert caught.value.field == "prompts"


@pytest.mark.parametrize(
    ("prompt", "part"),
    [
        ("", "empty"),
        ([[]], "empty"),
        ([True], "integers"),
        ([10**6], "vocabulary"),
        ([1, "a"], "integers"),
        (["a" * 1000], "context length"),
        ("\ud800", "surrogate"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": "a"}, "b"], "messages"),
    ],
)
def test_a_single_invalid_prompt_raises(prompt: Any, part: str) -> None:
    with make_llm() as llm, pytest.raises(InvalidRequestError, match=part):
        llm.generate(prompt)


def test_an_invalid_prompt_among_others_gets_an_error_result() -> None:
    with make_llm() as llm:
        good, bad, also_good = llm.generate(["a", "a" * 1000, "b"], params(n=2))
        assert bad.finish_reason is FinishReason.ERROR
        assert "context length" in (bad.error or "")
        assert bad.timings is None
        assert [len(item.token_ids) for item in bad.completions] == [0, 0]
        assert [good.error, also_good.error] == [None, None]
        with pytest.raises(InvalidRequestError, match="empty"):
            llm.generate(["", "a" * 1000])


@pytest.mark.parametrize("wrong", [[params()], [params()] * 3, "x", 3, [params(), None]])
def test_params_are_one_or_one_for_each(wrong: Any) -> None:
    with make_llm() as llm, pytest.raises(InvalidRequestError) as caught:
        llm.generate(["a", "b"], wrong)
    assert caught.value.field == "params"


def test_the_context_length_at_one_under_and_one_over() -> None:
    with make_llm(context_length=64) as llm:
        (output,) = llm.generate([1] * 63, SamplingParams(temperature=0))
        assert output.usage.completion_tokens == 1
        for size in (64, 65):
            with pytest.raises(InvalidRequestError, match="context"):
                llm.generate([1] * size)
        (empty,) = llm.generate([1] * 64, params(max_tokens=0))
        assert (empty.text, empty.finish_reason) == ("", FinishReason.LENGTH)
        (one,) = llm.generate([1] * 63, params(max_tokens=1))
        assert len(one.completions[0].token_ids) == 1


def test_max_tokens_zero_gives_empty_completions() -> None:
    with make_llm() as llm:
        (output,) = llm.generate("a", params(max_tokens=0, n=3))
        assert [(item.text, item.token_ids, item.finish_reason) for item in output.completions] == [
            ("", (), FinishReason.LENGTH)
        ] * 3
        assert llm.stats().steps == 0


def test_ten_thousand_prompts_with_a_small_queue() -> None:
    with make_llm(max_num_seqs=64, max_waiting=64) as llm:
        outputs = llm.generate([[1 + i % 200] for i in range(10_000)], params(max_tokens=2))
        assert len(outputs) == 10_000
        assert all(output.prompt_ids == (1 + i % 200,) for i, output in enumerate(outputs))
        assert all(output.usage.completion_tokens == 2 for output in outputs)


def test_a_queue_of_one_is_enough() -> None:
    with make_llm(max_num_seqs=2, max_waiting=1) as llm:
        outputs = llm.generate([[1 + i] for i in range(50)], params())
        assert all(output.usage.completion_tokens == 5 for output in outputs)


def test_several_threads_share_one_llm() -> None:
    with make_llm(max_num_seqs=4, max_waiting=4) as llm:
        prompts = [[1 + i] for i in range(40)]
        expected = [output.text for output in llm.generate(prompts, params())]
        results: list[list[str]] = []
        threads = [
            threading.Thread(target=lambda: results.append([o.text for o in llm.generate(prompts, params())]))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert results == [expected] * 4


def test_seeded_and_drawn_seeds_reproduce() -> None:
    with make_llm() as llm:
        drawn, again = llm.generate(["a", "a"], params(temperature=1.0, max_tokens=20))
        assert drawn.seed != again.seed
        assert drawn.text != again.text
        (repeated,) = llm.generate("a", params(temperature=1.0, max_tokens=20, seed=drawn.seed))
        assert repeated.completions == drawn.completions


def test_a_cached_prefix_is_counted_and_changes_nothing() -> None:
    prompt = [1 + i % 50 for i in range(60)]
    with make_llm() as llm:
        (cold,) = llm.generate(prompt, params())
        (warm,) = llm.generate(prompt, params())
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 48)
    assert warm.completions == cold.completions


def test_logprobs_come_with_every_token() -> None:
    with make_llm() as llm:
        (output,) = llm.generate("a", params(logprobs=2))
    assert [len(entry.top) for entry in output.completions[0].logprobs] == [2] * 5


def test_stop_strings_and_end_tokens() -> None:
    with make_llm(script="one, two, three") as llm:
        (output,) = llm.generate([1], params(max_tokens=15, stop=", th"))
        assert (output.text, output.finish_reason) == ("one, two", FinishReason.STOP)
    with make_llm(script=[*b"ok", EOS]) as llm:
        (output,) = llm.generate([1], SamplingParams(temperature=0))
        assert (output.text, output.finish_reason) == ("ok", FinishReason.STOP)
        assert output.usage.completion_tokens == 3


@pytest.mark.parametrize("kind", ["error", "raise", "raise_step"])
def test_a_failing_request_leaves_the_others_results(kind: Any) -> None:
    with make_llm(faults=(Fault(request_id="request-2", kind=kind, after=1),)) as llm:
        first, guilty, third = llm.generate([[1], [2], [3]], params())
        assert [first.error, third.error] == [None, None]
        assert guilty.finish_reason is FinishReason.ERROR
        assert "scripted fault" in (guilty.error or "")
        assert len(guilty.completions[0].token_ids) == 1


def test_chat_and_stream_raise_when_their_request_fails() -> None:
    faults = tuple(Fault(request_id=f"request-{i}", kind="error", after=1) for i in (1, 2))
    with make_llm(faults=faults) as llm:
        with pytest.raises(RequestFailedError, match="scripted"):
            llm.chat([{"role": "user", "content": "a"}], params())
        with llm.stream("a", params()) as stream:
            assert next(stream).finish is None
            assert next(stream).finish is FinishReason.ERROR
            with pytest.raises(RequestFailedError, match="scripted"):
                next(stream)


def test_chat_needs_messages_and_a_template() -> None:
    with make_llm() as llm:
        for wrong in ("a", [], [[{"role": "user", "content": "a"}]]):
            with pytest.raises(InvalidRequestError) as caught:
                llm.chat(wrong)  # type: ignore[arg-type]
            assert caught.value.field == "messages"
    with make_llm(template=False) as llm, pytest.raises(InvalidRequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "a"}])


def test_a_stream_gives_what_generate_gives() -> None:
    with make_llm() as llm:
        (whole,) = llm.generate("a", params(n=2, seed=1, temperature=1.0))
        with llm.stream("a", params(n=2, seed=1, temperature=1.0)) as stream:
            chunks = list(stream)
        assert stream.output.completions == whole.completions
        for index in range(2):
            assert "".join(chunk.text for chunk in chunks if chunk.index == index) == whole.completions[index].text
        assert [chunk.finish for chunk in llm.stream("a", params(max_tokens=0))] == [FinishReason.LENGTH]
        with pytest.raises(InvalidRequestError):
            llm.stream(["a", "b"])  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="empty"):
            llm.stream("")


@pytest.mark.parametrize("way", ["close", "with", "drop"])
def test_leaving_a_stream_aborts(way: str) -> None:
    with make_llm(context_length=5000, blocks=320) as llm:
        stream = llm.stream("a", params(max_tokens=4900))
        next(stream)
        if way == "close":
            stream.close()
            stream.close()
            assert list(stream) == []
        elif way == "with":
            with stream:
                next(stream)
        else:
            del stream
        llm.generate("b", params())
        assert llm.stats().generated_tokens < 4900
        assert llm.stats().scheduler.used_blocks == 0


def test_closing_events_aborts() -> None:
    with make_llm(context_length=5000, blocks=320) as llm:
        events = llm.events([[1], [2]], params(max_tokens=2000))
        next(events)
        events.close()
        llm.generate("b", params())
        assert llm.stats().scheduler.used_blocks == 0


def test_an_interrupt_aborts_and_leaves_the_llm_usable() -> None:
    def interrupt(step: int) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with make_llm(on_step=interrupt, max_num_seqs=4) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1 + i] for i in range(50)], params(max_tokens=200))
        (output,) = llm.generate([1], params())
        assert output.usage.completion_tokens == 5
        assert llm.stats().scheduler.used_blocks == 0
        assert llm.stats().scheduler.waiting == 0


def test_close_is_idempotent_and_final() -> None:
    llm = make_llm()
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError):
        llm.generate("a")
    with pytest.raises(EngineClosedError):
        llm.stream("a")


def test_a_dead_engine_raises_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("the books are wrong")

    with make_llm() as llm:
        monkeypatch.setattr(llm._engine._engine._scheduler, "commit", broken)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="the books are wrong"):
                llm.generate(["a", "b"])
        with pytest.raises(EngineDeadError):
            llm.stream("a")


def test_unknown_options_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="unknown option") as caught:
        LLM("no such model", max_batch=3)
    assert caught.value.field == "max_batch"
    assert isinstance(caught.value, ShoalError)


def test_progress_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with make_llm() as llm:
        llm.generate([[1], [2]], params(), progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2/2" in captured.err
    assert "10 tokens" in captured.err
