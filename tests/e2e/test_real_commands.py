"""The commands on the default model, as subprocesses."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.model
ROOT = Path(__file__).parent.parent.parent
LAUNCH = "from shoal.cli import main; main()"


@pytest.fixture(scope="module")
def shoal(model_path: Path):
    def run(*arguments: str, stdin: str = "", status: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", LAUNCH, *arguments]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, check=False, env=dict(os.environ), timeout=300
        )
        assert done.returncode == status, done.stderr
        return done

    return run


def test_run_answers_the_examples_in_order(shoal, model_path: Path, tmp_path: Path) -> None:
    lines = (ROOT / "examples" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    out = tmp_path / "out.jsonl"
    done = shoal("run", str(ROOT / "examples" / "prompts.jsonl"), "-m", str(model_path), "-o", str(out), "--json")
    answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [item["id"] for item in answers] == [json.loads(line)["id"] for line in lines]
    assert all(item["text"] for item in answers)
    summary = json.loads(done.stdout)
    assert summary["done"] == summary["requests"] == len(lines)
    assert summary["failed"] == 0
    assert summary["mean_batch"] > 4
    assert summary["cached_tokens"] > 0
    assert 0 < summary["kv_blocks_peak"] <= summary["kv_blocks_total"]
    assert set(summary["ttft_s"]) == set(summary["itl_s"]) == {"p50", "p95", "p99"}
    # The largest child so far; the pool for 16k tokens is there but used in part.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 10**9


def test_generate_is_the_same_every_time_and_as_json(shoal, model_path: Path) -> None:
    arguments = ("-m", str(model_path), "--max-tokens", "12")
    plain = shoal("generate", "Name a colour.", *arguments).stdout
    record = json.loads(shoal("generate", "-", "--json", *arguments, stdin="Name a colour.").stdout)
    assert record["completions"][0]["text"].strip() == plain.strip()
    seeded = ("generate", "Name a colour.", *arguments, "--temperature", "1", "--seed", "7")
    assert shoal(*seeded).stdout == shoal(*seeded).stdout


def test_chat_takes_turns_from_a_pipe(shoal, model_path: Path) -> None:
    done = shoal("chat", "-m", str(model_path), "--max-tokens", "8", stdin="Hello\n/reset\nHello\n/exit\n")
    assert done.stdout.strip()


def test_verify_and_info_and_eval_give_json(shoal, model_path: Path, tmp_path: Path) -> None:
    report = json.loads(shoal("verify", "-m", str(model_path), "--requests", "24", "--json").stdout)
    assert report["requests"] == 24
    assert report["mismatches"] == 0
    facts = json.loads(shoal("info", "-m", str(model_path), "--json").stdout)
    assert facts["model"]["layers"] == 30
    assert {item["name"] for item in facts["options"]} >= {"precision", "isa", "threads", "kv_tokens"}
    assert all(item["reason"] for item in facts["options"])
    text = tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged, that a single man in possession. " * 12, encoding="utf-8")
    quality = json.loads(
        shoal("eval", "-m", str(model_path), "--text", str(text), "--window", "96", "--run-in", "32", "--json").stdout
    )
    assert quality["perplexity"] / quality["reference_perplexity"] == pytest.approx(1, abs=0.05)
    assert 0 <= quality["kl"] < 0.05
    assert quality["top1"] > 0.9


def test_errors_are_one_line(shoal, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00")
    for arguments in (
        ("generate", "x", "-m", str(broken)),
        ("eval", "--text", "/no/such/file"),
        ("info", "-m", "nope"),
    ):
        done = shoal(*arguments, status=1)
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr
