"""Log-probabilities of prompts: there once, complete, and the same in every circumstance."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import Recorder, make_engine, make_loaded, make_request, run_until_idle

from shoal import LLM, SamplingParams
from shoal.assembly import load_model
from shoal.backends.null import Fault
from shoal.config import EngineConfig
from shoal.core.params import MAX_LOGPROBS
from shoal.core.plan import TokenLogprobs
from shoal.core.request import FinishReason
from shoal.engine.messages import Submit
from shoal.engine.outputs import RequestOutput
from shoal.errors import InvalidRequestError

PROMPT = [number % 50 for number in range(100)]


def make_llm(**options: Any) -> LLM:
    return LLM.from_loaded(make_loaded(**options))


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 3, "prompt_logprobs": 2, **options})


def scores(prompt: list[int], **options: Any) -> tuple[TokenLogprobs, ...]:
    with make_llm(**options) as llm:
        return llm.generate([prompt], params())[0].prompt_logprobs


def test_there_is_one_for_every_token_but_the_first() -> None:
    with make_llm() as llm:
        output = llm.generate([PROMPT], params())[0]
        plain = llm.generate([PROMPT], params(prompt_logprobs=None))[0]
    assert len(output.prompt_logprobs) == len(PROMPT) - 1
    assert all(len(item.top) == 2 for item in output.prompt_logprobs)
    assert len(set(output.prompt_logprobs)) > 50
    assert plain.prompt_logprobs == ()
    assert plain.completions == output.completions


@pytest.mark.parametrize("options", [{"token_budget": 7, "max_num_seqs": 2}, {"blocks": 8}, {"prefix_caching": False}])
def test_they_are_the_same_in_every_circumstance(options: dict[str, Any]) -> None:
    alone = scores(PROMPT)
    company = [[number % 60 for number in range(seed, seed + 30)] for seed in range(6)]
    expected = [scores(prompt) for prompt in company]
    with make_llm(**options) as llm:
        for _ in range(2):  # the second time with a warm prefix cache
            outputs = llm.generate([*company, PROMPT, PROMPT], params(max_tokens=9))
            assert [output.prompt_logprobs for output in outputs] == [*expected, alone, alone]


def test_a_cached_prefix_is_computed_again_to_be_scored() -> None:
    with make_llm() as llm:
        llm.generate([PROMPT], params(prompt_logprobs=None))
        scored = llm.generate([PROMPT], params())[0]
        cached = llm.generate([PROMPT], params(prompt_logprobs=None))[0]
    assert scored.usage.cached_tokens == 0
    assert cached.usage.cached_tokens == len(PROMPT) // 16 * 16
    assert scored.prompt_logprobs == scores(PROMPT)


def test_preempted_while_scoring() -> None:
    """Two sequences do not fit together; whoever gives way begins again, and nothing is told twice."""
    expected = scores(PROMPT)
    engine = make_engine(blocks=12, token_budget=32)
    outbox = Recorder()
    lengths = {"first": 70, "second": 100}
    for name, length in lengths.items():
        request = make_request(name, prompt=PROMPT[:length], prompt_logprobs=2, max_tokens=40, ignore_eos=True)
        engine.inbox.submit(Submit(request, outbox, 0.0))
    run_until_idle(engine)
    assert engine.stats.scheduler.preemptions > 0
    for name, length in lengths.items():
        told = [chunk.prompt_logprobs for chunk in outbox.chunks if chunk.request_id == name]
        assert told[0] == expected[: length - 1]
        assert not any(told[1:])


@pytest.mark.parametrize("n", [1, 3])
def test_no_tokens_at_all(n: int) -> None:
    with make_llm() as llm:
        output = llm.generate([PROMPT], params(max_tokens=0, n=n))[0]
    assert output.prompt_logprobs == scores(PROMPT)
    assert [(item.text, item.token_ids, item.finish_reason) for item in output.completions] == [
        ("", (), FinishReason.LENGTH)
    ] * n
    assert output.usage.completion_tokens == 0


def test_a_prompt_that_fills_the_context() -> None:
    with make_llm(context_length=len(PROMPT)) as llm:
        assert llm.generate([PROMPT], params(max_tokens=0))[0].prompt_logprobs == scores(PROMPT)
        with pytest.raises(InvalidRequestError, match="fills the context"):
            llm.generate([PROMPT], params(max_tokens=1))


def test_a_prompt_that_does_not_fit_the_cache() -> None:
    with make_llm(blocks=4) as llm:
        with pytest.raises(InvalidRequestError, match="the KV cache holds 64"):
            llm.generate([PROMPT], params(max_tokens=0))
        assert len(llm.generate([PROMPT[:64]], params(max_tokens=0))[0].prompt_logprobs) == 63


def test_one_token_has_nothing_before_it() -> None:
    with make_llm() as llm:
        for most in (0, 2):
            output = llm.generate([[5]], params(max_tokens=most))[0]
            assert output.prompt_logprobs == ()
            assert output.usage.completion_tokens == most


def test_several_completions_share_them() -> None:
    with make_llm() as llm:
        output = llm.generate([PROMPT], params(n=3, temperature=1.0, seed=1))[0]
        plain = llm.generate([PROMPT], params(n=3, temperature=1.0, seed=1, prompt_logprobs=None))[0]
    assert output.prompt_logprobs == scores(PROMPT)
    assert output.completions == plain.completions


@pytest.mark.parametrize("value", [-1, MAX_LOGPROBS + 1, True, 1.5, "2"])
def test_the_parameter_is_checked(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=value)


def test_they_come_with_the_first_chunk_also_to_a_slow_reader() -> None:
    async def read(wait: bool) -> list[int]:
        with make_llm() as llm:
            stream = await llm.client().submit(PROMPT, params(max_tokens=20))
            if wait:
                while llm.stats().scheduler.running or not llm.stats().generated_tokens:
                    await asyncio.sleep(0.001)
            return [len(chunk.prompt_logprobs) async for chunk in stream]

    at_once, late = asyncio.run(read(False)), asyncio.run(read(True))
    assert at_once[0] == late[0] == len(PROMPT) - 1
    assert not any(at_once[1:])
    assert len(late) < 20


def test_a_fault_while_scoring_fails_the_guilty_only() -> None:
    fault = Fault(request_id="bad", kind="raise")
    engine = make_engine(faults=(fault,), token_budget=40)
    outbox = Recorder()
    for name in ("bad", "good"):
        request = make_request(name, prompt=PROMPT, prompt_logprobs=1, max_tokens=2)
        engine.inbox.submit(Submit(request, outbox, 0.0))
    run_until_idle(engine)
    assert outbox.result("bad", 0)[2] is FinishReason.ERROR
    assert outbox.result("good", 0)[2] is FinishReason.LENGTH
    given = [len(chunk.prompt_logprobs) for chunk in outbox.chunks if chunk.request_id == "good"]
    assert given == [len(PROMPT) - 1, 0]


def test_an_abort_while_scoring_frees_everything() -> None:
    engine = make_engine(token_budget=16)
    outbox = Recorder()
    engine.inbox.submit(Submit(make_request("a", prompt=PROMPT, prompt_logprobs=1), outbox, 0.0))
    engine.step()
    engine.inbox.abort("a")
    engine.step()
    assert outbox.result("a", 0)[2] is FinishReason.ABORT
    assert not engine.has_work()


@pytest.mark.model
def test_the_real_model_says_what_its_logits_say(model_path: Path) -> None:
    text = "The tide comes in twice a day, and twice a day it goes out again. " * 6
    loaded = load_model(model_path, EngineConfig(context_length=512, kv_tokens=2048, max_num_seqs=4))
    ids = loaded.tokenizer.encode(text)
    logits = loaded.backend.logits(ids).astype(np.float64)
    expected = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
    expected -= logits.max(1, keepdims=True)
    with LLM.from_loaded(loaded) as llm:
        outputs: list[RequestOutput] = llm.generate(
            [ids, ids, "Something else."], [params(), params(prompt_logprobs=None), params()]
        )
    found = outputs[0].prompt_logprobs
    assert len(found) == len(ids) - 1 > 80
    for position, (item, token) in enumerate(zip(found, ids[1:], strict=True)):
        assert item.logprob == pytest.approx(expected[position, token], abs=1e-5)
        best = int(np.argmax(logits[position]))
        assert item.top[0] == (best, pytest.approx(expected[position, best], abs=1e-5))
    assert outputs[0].completions == outputs[1].completions
