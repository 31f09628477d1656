"""Greedy text of the default model through the whole engine, batched, against an independent implementation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal import LLM, SamplingParams

pytestmark = pytest.mark.model
CLEAR = 1e-2  # where the best two tokens are closer than this, either may win


def test_float32_text_in_one_batch(golden: Path, model_path: Path) -> None:
    with (golden / "greedy.jsonl").open(encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if row["n_prompt"] <= 400]
    assert len(rows) > 10
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=5)
    with LLM(model_path, precision="f32") as llm:
        outputs = llm.generate([row["prompt_ids"] for row in rows], params)
    for row, output in zip(rows, outputs, strict=True):
        (completion,) = output.completions
        assert len(completion.token_ids) == 48
        for place, (found, wanted) in enumerate(zip(completion.token_ids, row["tokens"], strict=True)):
            assert abs(completion.logprobs[place].top[0][1] - row["top5_logprobs"][place][0]) < 2e-3
            if found != wanted:
                assert row["margin"][place] <= CLEAR
                break  # from here on the texts differ rightly
        else:
            assert completion.text == llm.model.tokenizer.decode(row["tokens"])
