"""``shoal bench engine`` on a model so small that only the command takes time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

sys.path += [str(Path(__file__).parents[1] / name) for name in ("models", "engine")]

from engine_support import byte_tokenizer
from gguf_writer import tiny_llama

from shoal.cli.app import make_app
from shoal.perf.ceilings import Ceilings, Rate, ScaledRate, available_paths


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = byte_tokenizer().spec
    tokens, types = [*spec.tokens, "ab"], [*spec.token_types, 1]
    table = np.random.default_rng(1).standard_normal((len(tokens), 8))
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    changes: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": spec.eos_id,
        "token_embd.weight": table,
    }
    path.write_bytes(tiny_llama(**changes).build())
    return path


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring the machine has its own tests."""

    def measure(threads: int, *, paths: Any = None, sets: Any = (), most_bytes: int | None = None) -> Ceilings:
        same = ScaledRate(Rate(1e10, 9e9), Rate(2e10, 1e10))
        return Ceilings(
            threads=threads,
            stream_bytes=2**28,
            reads={2**28: same, **dict.fromkeys(sets, same)},
            peaks=dict.fromkeys(paths or available_paths(), same),
        )

    monkeypatch.setattr("shoal.perf.ceilings.measure_ceilings", measure)


def bench(model: Path, *arguments: str) -> Result:
    command = ["bench", "engine", "-m", str(model), "--prompt-len", "12", "--output-len", "5", "--rounds", "1"]
    return CliRunner().invoke(make_app(), [*command, *arguments])


def test_json_holds_what_another_program_needs(tiny: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    done = bench(tiny, "--batch", "1,3", "--rounds", "2", "--json", "--output", str(kept), "--threads", "1")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert json.loads(kept.read_text(encoding="utf-8")) == record
    assert {"shoal", "date", "machine", "model", "precision", "kv_dtype", "ceilings", "warnings"} <= record.keys()
    assert {"cpu", "cores", "instruction_sets"} <= record["machine"].keys()
    assert (record["threads"], record["rounds"], record["prompt_len"], record["output_len"]) == (1, 2, 12, 5)
    assert [item["batch"] for item in record["results"]] == [1, 3]
    for item in record["results"]:
        assert item["prefill_tokens_per_s"] > 0
        assert item["decode_tokens_per_s"] > 0
        assert item["ceiling_tokens_per_s"] > 0
        assert item["ceiling_fraction"] > 0
        assert {"linear", "attention", "sampling", "scheduling", "text", "rest"} <= item["split_ms"].keys()
        assert item["steps"] == 2 * 4, "five tokens, the first of which comes with the prompt, in two rounds"
    assert record["weight_bytes"] > 0
    assert record["instructions"]["attention"] in record["ceilings"]["peaks_ops_per_s"]


def test_the_table_says_what_binds_at_each_batch(tiny: Path) -> None:
    done = bench(tiny, "--batch", "2,4")
    assert done.exit_code == 0, done.output
    assert "measured limits: reading 20 GB/s" in done.stdout
    for batch in (2, 4):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"batch {batch}: bound by")]
        assert "reading memory" in line or "arithmetic" in line
    assert "scheduling" in done.stdout


def test_a_batch_that_thins_out_is_told(tiny: Path) -> None:
    thin = bench(tiny, "--batch", "4", "--prompt-len", "32", "--output-len", "3", "--token-budget", "32")
    assert thin.exit_code == 0, thin.output
    assert "sequences a decode step on average" in thin.stdout
    full = bench(tiny, "--batch", "4")
    assert "on average" not in full.stdout


def test_mixed_loads_and_other_sampling_run(tiny: Path) -> None:
    done = bench(tiny, "--batch", "2", "--mixed", "--temperature", "1", "--top-p", "0.9", "--json")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["mixed"] is True
    assert record["sampling"] == {"temperature": 1.0, "top_p": 0.9}
    assert record["results"][0]["requests"] == 8


def test_neighbours_are_reported(tiny: Path) -> None:
    done = bench(tiny, "--batch", "2", "--neighbour", "1", "--json")
    assert done.exit_code == 0, done.output
    (item,) = json.loads(done.stdout)["results"]
    assert item["beside"]["neighbours"] == 1
    assert item["beside"]["slowdown"] > 0
    shown = bench(tiny, "--batch", "2", "--neighbour", "1")
    assert "batch 2 beside 1 busy" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "name"),
    [
        (("--batch", "1,,2"), 2, "--batch"),
        (("--batch", "0"), 2, "--batch"),
        (("--batch", "5000"), 2, "--batch"),
        (("--batch", "x"), 2, "--batch"),
        (("--prompt-len", "0"), 2, "--prompt-len"),
        (("--output-len", "1"), 2, "--output-len"),
        (("--rounds", "0"), 2, "--rounds"),
        (("--neighbour", "-1"), 2, "--neighbour"),
        (("--precision", "f8"), 2, "--precision"),
        (("--kv-dtype", "f8"), 2, "--kv-dtype"),
        (("--threads", "0"), 2, "--threads"),
        (("--token-budget", "0"), 2, "--token-budget"),
        (("--temperature", "-1"), 2, "--temperature"),
        (("--top-p", "2"), 2, "--top-p"),
        (("--output", "/nowhere/at/all.json"), 2, "--output"),
        (("--kv-tokens", "1024"), 2, "--kv-tokens"),
        (("--prompt-len", "1000000000000"), 1, "prompt_len"),
        (("--prompt-len", "60"), 1, "prompt_len"),
    ],
)
def test_every_wrong_option_is_named(tiny: Path, arguments: tuple[str, ...], status: int, name: str) -> None:
    done = bench(tiny, *arguments)
    assert done.exit_code == status, done.output
    assert name in done.stderr


def test_a_batch_beyond_memory_is_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.bench.subject.available_memory", lambda: 10_000)
    done = bench(tiny, "--batch", "1,64")
    assert done.exit_code == 1
    assert "batch: 64 sequences of 17 tokens need" in done.stderr
