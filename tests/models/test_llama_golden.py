"""The Llama forward pass, on the reference operations, against logits and greedy tokens of independent implementations.

Each case runs several ways through a paged cache of shuffled blocks: the prompt whole, the prompt in uneven chunks, and
then token by token. The margin rule: where the golden's two best tokens are closer than ``MARGIN``, either may win.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hf_source import load_hf

from shoal.kernels.ops import StepInputs
from shoal.kernels.reference import ReferenceCache, ReferenceOps, ReferenceWeights
from shoal.models import GGUFFile, describe
from shoal.models.dequantize import dequantize
from shoal.models.description import LlamaWeights, ModelDescription
from shoal.models.llama import forward

DATA = Path(__file__).parent.parent / "golden" / "data"
TINY = DATA / "tiny"
MARGIN = 1e-3
BLOCK = 16


class Text:
    """One sequence of a model, fed in pieces through shuffled blocks."""

    def __init__(self, model: ModelDescription, weights: LlamaWeights, expanded: ReferenceWeights, room: int) -> None:
        self.model, self.weights, self.expanded = model, weights, expanded
        blocks = -(-room // BLOCK)
        self.table = np.random.default_rng(blocks).permutation(blocks + 3)[:blocks].astype(np.int32)[None, :]
        self.length = 0
        self.cache = ReferenceCache(
            num_layers=model.num_layers,
            num_blocks=blocks + 3,
            block_size=BLOCK,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
        )

    def feed(self, ids: np.ndarray, *, last_only: bool = False) -> np.ndarray:
        rows = np.arange(len(ids), dtype=np.int32)
        inputs = StepInputs(
            token_ids=np.asarray(ids, dtype=np.int32),
            positions=rows + np.int32(self.length),
            row_starts=np.array([0, len(ids)], dtype=np.int32),
            block_tables=self.table,
            sample_rows=rows[-1:] if last_only else rows,
        )
        self.length += len(ids)
        return forward(ReferenceOps(inputs, self.cache, self.expanded), self.model, self.weights)


def pieces(ids: np.ndarray, sizes: tuple[int, ...]) -> Iterator[np.ndarray]:
    start = 0
    for size in sizes:
        yield ids[start : start + size]
        start += size
    if start < len(ids):
        yield ids[start:]


def check_greedy(text: Text, logits: np.ndarray, tokens: np.ndarray, margins: np.ndarray, limit: float) -> None:
    """Teacher forcing: after each golden token the next one wins, unless the golden itself was in doubt."""
    for token, margin in zip(tokens, margins, strict=True):
        if margin > limit:
            assert int(np.argmax(logits)) == int(token)
        logits = text.feed(np.array([token]))[-1]


def check_case(model: ModelDescription, weights: LlamaWeights, golden: dict[str, np.ndarray], prefix: str) -> None:
    expanded = ReferenceWeights(dequantize)
    for prompt in ("p0", "p1", "p2"):
        ids, positions = golden[f"{prompt}_ids"], golden[f"{prompt}_pos"]
        expected = golden[f"{prefix}{prompt}_logits"]
        tokens, margins = golden[f"{prefix}{prompt}_greedy"], golden[f"{prefix}{prompt}_greedy_margin"]
        for sizes in ((), (1, 5, 2, 17, 16)):
            text = Text(model, weights, expanded, len(ids) + len(tokens))
            logits = np.concatenate([text.feed(piece) for piece in pieces(ids, sizes) if len(piece)])
            np.testing.assert_allclose(logits[positions], expected, rtol=0, atol=1e-4)
            check_greedy(text, logits[-1], tokens, margins, MARGIN)


@pytest.mark.parametrize("name", ["llama", "llama-bias-linear", "llama3-rope"])
def test_tiny_hugging_face_models(name: str) -> None:
    model, weights = load_hf(TINY / name)
    with np.load(TINY / name / "ref.npz") as golden:
        check_case(model, weights, dict(golden), "")


GGUF_FILES = sorted(path.relative_to(TINY).as_posix() for path in TINY.glob("*-gguf/*.gguf"))


@pytest.mark.parametrize("name", GGUF_FILES)
def test_tiny_gguf_models(name: str) -> None:
    path = TINY / name
    type_name = path.name.split(".")[1]
    with np.load(path.parent / "gguf_ref.npz") as golden:
        described = describe(GGUFFile.open(path))
        check_case(*described, dict(golden), f"{type_name}_")


def test_chunks_change_no_bit() -> None:
    path = TINY / "llama-gguf" / "tiny-llama.Q4_1.gguf"
    model, weights = describe(GGUFFile.open(path))
    ids = np.random.default_rng(0).integers(0, model.vocab_size, 90)
    for precision in ("f32", "bf16", "native"):
        expanded = ReferenceWeights(dequantize, precision)
        whole = Text(model, weights, expanded, 90).feed(ids)
        for sizes in ((1,) * 90, (17, 1, 30), (64,)):
            text = Text(model, weights, expanded, 90)
            parts = np.concatenate([text.feed(piece) for piece in pieces(ids, sizes) if len(piece)])
            np.testing.assert_array_equal(parts, whole)


def greedy_rows(shortest: int = 3) -> list[dict]:
    """The shortest few of the golden prompts of the real model, and one that is long."""
    with (DATA / "greedy.jsonl").open(encoding="utf-8") as file:
        rows = sorted((json.loads(line) for line in file), key=lambda row: row["n_prompt"])
    return [*rows[:shortest], next((row for row in rows if row["n_prompt"] > 200), rows[-1])]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


@pytest.mark.slow
@pytest.mark.model
def test_the_real_model_in_float32(model_path: Path) -> None:
    model, weights = describe(GGUFFile.open(model_path))
    expanded = ReferenceWeights(dequantize)
    for row in greedy_rows():
        text = Text(model, weights, expanded, row["n_prompt"] + len(row["tokens"]))
        logits = text.feed(np.array(row["prompt_ids"]), last_only=True)[-1]
        for step, token in enumerate(row["tokens"]):
            ranked = log_softmax(logits)
            np.testing.assert_allclose(
                ranked[row["top5_ids"][step]], row["top5_logprobs"][step], rtol=0, atol=1e-3, err_msg=f"step {step}"
            )
            if row["margin"][step] > 2e-3:
                assert int(np.argmax(logits)) == token
            logits = text.feed(np.array([token]))[-1]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(("precision", "scheme"), [("bf16", "bf16"), ("native", "w4n_a8g32")])
def test_the_real_model_in_low_precision(model_path: Path, precision: str, scheme: str) -> None:
    """No further from float32 than an independent simulation of the like scheme, with half as much again for luck."""
    limits = json.loads((DATA / "greedy_lowprec.json").read_text(encoding="utf-8"))[scheme]
    model, weights = describe(GGUFFile.open(model_path))
    expanded = ReferenceWeights(dequantize, precision)
    differences: list[np.ndarray] = []
    for row in greedy_rows(6):
        ids = np.array(row["prompt_ids"] + row["tokens"][:-1])
        logits = Text(model, weights, expanded, len(ids)).feed(ids)[len(row["prompt_ids"]) - 1 :]
        ranked = log_softmax(logits)
        told = np.take_along_axis(ranked, np.array(row["top5_ids"]), axis=1)
        differences.append(np.abs(told - np.array(row["top5_logprobs"])))
        flipped = np.argmax(logits, axis=1) != np.array(row["tokens"])
        assert (np.array(row["margin"])[flipped] <= 1.5 * limits["largest_flipped_margins"][0][0]).all()
    joined = np.concatenate(differences)
    for part, name in ((joined[:, 0], "abs_dlogprob_top1"), (joined, "abs_dlogprob_top5")):
        assert part.mean() <= 1.5 * limits[name]["mean"]
        assert part.max() <= 1.5 * limits[name]["max"]
        # Rounding that does nothing would pass any upper limit.
        assert part.mean() >= 0.2 * limits[name]["mean"]


@pytest.mark.slow
@pytest.mark.model
def test_full_logits_of_the_real_model(model_path: Path) -> None:
    model, weights = describe(GGUFFile.open(model_path))
    expanded = ReferenceWeights(dequantize)
    with np.load(DATA / "logits.npz") as golden:
        shortest = sorted(range(8), key=lambda j: len(golden[f"p{j}_ids"]))[:3]
        for j in shortest:
            ids, positions = golden[f"p{j}_ids"], golden[f"p{j}_pos"]
            logits = Text(model, weights, expanded, len(ids)).feed(ids)[positions]
            expected = golden[f"p{j}_logits_q"].astype(np.float64) * float(golden["scale"])
            expected -= golden[f"p{j}_logsumexp"].reshape(-1, 1)
            # The goldens are stored in steps of 1/512, which adds 1e-3 to the limit of 1e-3.
            np.testing.assert_allclose(log_softmax(logits), expected, rtol=0, atol=2e-3)
            for top_ids, top, row in zip(golden[f"p{j}_top64_ids"], golden[f"p{j}_top64"], logits, strict=True):
                np.testing.assert_allclose(row[top_ids], top, rtol=0, atol=1e-3)
