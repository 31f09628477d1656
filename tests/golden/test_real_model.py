"""The default model on the native kernels against independent references, teacher forced.

float32 may differ by float32's own noise only. The lower precisions may stray 1.5 times as far as a simulation of the
like scheme did (greedy_lowprec.json): in how far the log-probabilities move, in how often another token wins, and in
how clear a winner is overturned at most.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shoal.backends.cpu import CpuBackend
from shoal.kernels.native import available_isas
from shoal.models import GGUFFile, describe

pytestmark = pytest.mark.model
SLACK = 1.5


def backend(path: Path, precision: str, kv_dtype: str) -> CpuBackend:
    model = describe(GGUFFile.open(path))
    return CpuBackend(
        model.description,
        model.weights,
        precision=precision,
        kv_dtype=kv_dtype,
        isa=available_isas()[0],
        threads=2,
        num_blocks=128,
        block_size=16,
        context_length=2048,
        max_num_seqs=64,
        token_budget=64,
    )


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return result


def teacher_forced(native: CpuBackend, row: dict) -> NDArray[np.float64]:
    """Log-probabilities [steps, vocab] at each generated position, given the golden tokens before it."""
    ids = [*row["prompt_ids"], *row["tokens"][:-1]]
    return log_softmax(native.logits(ids)[len(row["prompt_ids"]) - 1 :])


def rows_of(golden: Path) -> list[dict]:
    with (golden / "greedy.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_float32_logits(golden: Path, model_path: Path) -> None:
    native = backend(model_path, "f32", "f32")
    with np.load(golden / "logits.npz") as arrays:
        scale = float(arrays["scale"])
        names = sorted(name[:-4] for name in arrays if name.endswith("_ids") and "top64" not in name)
        assert names
        for name in names:
            logits = native.logits(arrays[f"{name}_ids"].tolist())[arrays[f"{name}_pos"]]
            stored = arrays[f"{name}_logits_q"] * np.float64(scale)
            # The stored values are rounded to multiples of the scale, half of which comes on top of the bound.
            assert np.abs(logits - stored).max() <= 1e-3 + scale / 2
            top = np.take_along_axis(logits, arrays[f"{name}_top64_ids"].astype(np.intp), axis=1)
            assert np.abs(top - arrays[f"{name}_top64"]).max() <= 1e-3


def test_float32_greedy_and_prompt_logprobs(golden: Path, model_path: Path) -> None:
    native = backend(model_path, "f32", "f32")
    for row in rows_of(golden):
        found = teacher_forced(native, row)
        ids = np.array(row["top5_ids"])
        assert np.abs(np.take_along_axis(found, ids, axis=1) - row["top5_logprobs"]).max() <= 1e-3
        clear = np.array(row["margin"]) > 0.002
        assert (found.argmax(axis=1) == row["tokens"])[clear].all()
        if 1 < row["n_prompt"] <= 200:
            prompt = log_softmax(native.logits(row["prompt_ids"]))
            total = prompt[np.arange(row["n_prompt"] - 1), row["prompt_ids"][1:]].sum()
            assert abs(total - row["prompt_logprob_sum"]) <= 1e-3 * row["n_prompt"]


@pytest.mark.parametrize(
    ("precision", "kv_dtype", "scheme"),
    [
        ("bf16", "bf16", "bf16"),
        ("native", "f32", "w4n_a8g32"),
        # Nothing was simulated with keys and values in bfloat16; 8 bits per token and head is the nearest.
        ("native", "bf16", "w4n_a8g32_kvi8"),
        ("native", "int8", "w4n_a8g32_kvi8"),
        ("int4", "int8", "w4n_a8g32_kvi8"),  # a file of four bits: the same thing
    ],
)
def test_lower_precisions_stray_no_further_than_simulated(
    golden: Path, model_path: Path, precision: str, kv_dtype: str, scheme: str
) -> None:
    limits = json.loads((golden / "greedy_lowprec.json").read_text(encoding="utf-8"))[scheme]
    native = backend(model_path, precision, kv_dtype)
    flips = steps = 0
    flipped_margins, differences = [0.0], []
    for row in rows_of(golden):
        found = teacher_forced(native, row)
        wrong = found.argmax(axis=1) != row["tokens"]
        flips += int(wrong.sum())
        steps += len(wrong)
        flipped_margins += np.array(row["margin"])[wrong].tolist()
        differences.append(np.abs(found[np.arange(len(wrong)), row["tokens"]] - np.array(row["top5_logprobs"])[:, 0]))
    every = np.concatenate(differences)
    assert flips / steps <= SLACK * limits["flips"] / limits["steps"]
    assert max(flipped_margins) <= SLACK * limits["largest_flipped_margins"][0][0]
    assert every.mean() <= SLACK * limits["abs_dlogprob_top1"]["mean"]
    assert np.quantile(every, 0.99) <= SLACK * limits["abs_dlogprob_top1"]["p99"]
    assert every.max() <= SLACK * limits["abs_dlogprob_top1"]["max"]
