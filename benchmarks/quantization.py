"""Quality and speed of every precision with every KV cache type: `python benchmarks/quantization.py TEXT [MODEL]`.

Quality is measured against float32 weights and cache on the text, all schemes on the same windows (see
``shoal.evaluation``). Speed is that of the engine's own benchmark, all schemes in turn within each round, so that a
machine whose speed moves does so under all of them. Prints a Markdown table, and JSON with ``--json FILE``.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress

from shoal.assembly import build_backend, open_model
from shoal.bench.engine import run_round
from shoal.bench.machine import machine_facts
from shoal.bench.subject import load_subject
from shoal.bench.summary import prompt_rows
from shoal.bench.work import Work
from shoal.config import EngineConfig
from shoal.core.params import SamplingParams
from shoal.evaluation import RUN_IN, WINDOW, Quality, evaluate_all
from shoal.kernels.native import available_isas
from shoal.text.tokenizer import Tokenizer, TokenizerSpec

SCHEMES = (
    ("f32", "bf16"),
    ("f32", "int8"),
    ("bf16", "bf16"),
    ("bf16", "int8"),
    ("int8", "bf16"),
    ("int8", "int8"),
    ("int4", "f32"),
    ("int4", "bf16"),
    ("int4", "int8"),
)
CHUNK = 128
BATCHES = (1, 16, 64)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, help="UTF-8 text to score")
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--max-windows", type=int, default=None, help="score only so many windows of 1024 tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None, help="write the figures there, too")
    options = parser.parse_args()
    quality = measure_quality(options.text.read_text(encoding="utf-8"), options.model, options.max_windows)
    speed = measure_speed(options.model, options.rounds)
    rows = [
        {
            "precision": scheme[0],
            "kv_dtype": scheme[1],
            "perplexity": round(found.perplexity, 3),
            "change": found.change,
            "kl": found.kl,
            "top1": found.top1,
            "weight_bytes": speed[scheme]["weight_bytes"],
            "prefill_tokens_per_s": speed[scheme]["prefill"],
            "decode_tokens_per_s": speed[scheme]["decode"],
        }
        for scheme, found in zip(SCHEMES, quality, strict=True)
    ]
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine_facts(available_isas()),
        "model": options.model,
        "reference_perplexity": quality[0].reference_perplexity,
        "tokens": quality[0].tokens,
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(table(record))


def measure_quality(text: str, model: str, max_windows: int | None) -> list[Quality]:
    """Of every scheme, in their order."""
    found, resolved, file = open_model(model, EngineConfig())
    tokens = Tokenizer(TokenizerSpec.from_gguf(file.metadata, path=str(file.path))).encode(text)
    fitted = replace(resolved, max_num_seqs=CHUNK, token_budget=CHUNK, kv_tokens=WINDOW, context_length=WINDOW)
    backends = [
        build_backend(found, replace(fitted, precision=precision, kv_dtype=kv_dtype))
        for precision, kv_dtype in (("f32", "f32"), *SCHEMES)
    ]
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("quality", total=None)
        return evaluate_all(
            backends[0],
            backends[1:],
            tokens,
            window=WINDOW,
            run_in=RUN_IN,
            max_windows=max_windows,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def measure_speed(model: str, rounds: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Medians of tokens per second: prefill at the largest batch, decode at each."""
    work = Work(prompt_len=128, output_len=64, mixed=False)
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    loaded = {
        scheme: load_subject(model, EngineConfig(precision=scheme[0], kv_dtype=scheme[1]), work, BATCHES, params)
        for scheme in SCHEMES
    }
    rates: dict[tuple[str, str], dict[str, list[float]]] = {scheme: {} for scheme in SCHEMES}
    with Progress(console=Console(stderr=True), transient=True) as bar:
        for number in bar.track(range(rounds), description="speed"):
            for batch in BATCHES:
                for scheme in SCHEMES:
                    steps = run_round(loaded[scheme].subject, work, batch, seed=number)
                    prefill = [step for step in steps if prompt_rows(step)]
                    decode = [step for step in steps if not prompt_rows(step)]
                    kept = rates[scheme]
                    kept.setdefault("prefill", []).append(
                        sum(prompt_rows(step) for step in prefill) / sum(step.seconds for step in prefill)
                    )
                    kept.setdefault(str(batch), []).append(batch * len(decode) / sum(step.seconds for step in decode))
    return {
        scheme: {
            "weight_bytes": loaded[scheme].weight_bytes,
            "prefill": round(median(kept["prefill"][-rounds:])),
            "decode": {batch: round(median(kept[str(batch)])) for batch in BATCHES},
        }
        for scheme, kept in rates.items()
    }


def table(record: dict[str, Any]) -> str:
    """The figures as Markdown."""
    machine = record["machine"]
    lines = [
        f"{record['model']}, {record['date']}, {machine['cores']} cores of {machine['cpu']}. Perplexity of float32: "
        f"{record['reference_perplexity']:.3f} over {record['tokens']} tokens.",
        "",
        "| precision | KV cache | weights, MB | perplexity | KL, 1e-3 nats | same best token | prefill | "
        + " | ".join(f"decode B={batch}" for batch in BATCHES)
        + " |",
        "|---|---|---|---|---|---|---|" + "---|" * len(BATCHES),
    ]
    for row in record["rows"]:
        decode = row["decode_tokens_per_s"]
        lines.append(
            f"| {row['precision']} | {row['kv_dtype']} | {row['weight_bytes'] / 1e6:.0f} | {row['change']:+.2%} | "
            f"{1e3 * row['kl']:.2f} | {row['top1']:.1%} | {row['prefill_tokens_per_s']} | "
            + " | ".join(str(decode[batch]) for batch in BATCHES)
            + " |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
