"""Shoal beside other engines, on this machine: `python benchmarks/peers/compare.py`.

Sets up llama.cpp, OpenVINO GenAI and vLLM in environments of their own (minutes, gigabytes, once), then lets everybody
do the same work in turn, round after round: B sequences of random prompts, decoded greedily, end of sequence ignored,
no prefix cache. Writes a record (JSON), a table (Markdown) and a chart (SVG). A rival that cannot be installed, or
dies, is reported as such.

The perplexity beside each row is of the weights in that format, computed in float32 by Shoal and held against the
model's own file: what the conversion costs, before whatever an engine rounds while it computes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from chart import svg
from contenders import LLAMA_CPP, OPENVINO, RIVALS, ROWS, SHOAL, Contender, Work, llama_cpp_command, shoal_command
from environments import Environments, SetupError
from figures import Run, combine, describe_exit, parse_driver, parse_llama_cpp, parse_shoal
from table import markdown

from shoal.bench.machine import machine_facts
from shoal.bench.record import shoal_version
from shoal.config import cache_folder
from shoal.kernels.native import available_isas
from shoal.models import GGUFFile, describe
from shoal.models.catalog import DEFAULT_MODEL, resolve_model
from shoal.perf.ceilings import usable_cores

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "peers"
PROGRAM = Path(sys.executable).with_name("shoal")
TEXT = ROOT / "tests" / "golden" / "data" / "text" / "prose.txt"
QUALITY_WINDOWS = "6"


def say(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def main() -> None:
    """Set up, measure, write."""
    options = parse_arguments()
    work = Work(
        batches=tuple(options.batch),
        prompt_len=options.prompt_len,
        output_len=options.output_len,
        vocab=describe(GGUFFile.open(options.model)).description.vocab_size,
        threads=usable_cores(),
    )
    environments = Environments(options.folder.resolve(), options.model.resolve(), say)
    rows = [Contender(SHOAL, precision) for precision in options.precision]
    rows += [row for row in ROWS if options.only is None or row.engine in options.only]
    commands, problems, notes = prepare(rows, environments, work, options)
    if options.setup_only:
        return
    runs: dict[Contender, list[Run]] = {row: [] for row in rows}
    for number in range(options.rounds):
        for row, make in commands.items():
            say(f"round {number + 1} of {options.rounds}: {row.name}")
            runs[row].append(run_one(row, make, number, options))
    record = make_record(
        runs,
        problems=problems,
        notes=notes,
        work=work,
        options=options,
        changes=quality(rows, environments, options),
    )
    write(record, options.output)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a model's name, or its .gguf file; in Q4_1")
    parser.add_argument("--folder", type=Path, default=BUILD, help="where environments and models go")
    parser.add_argument("--output", type=Path, default=BUILD / "results", help="folder of the results")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--precision", nargs="+", default=["auto", "int8"], help="Shoal's")
    parser.add_argument("--only", nargs="+", choices=[rival.name for rival in RIVALS], help="only these rivals")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds for one round, waiting under --under included"
    )
    parser.add_argument("--under", default="", help="put this command in front of each run, such as taskset -c 0,1")
    parser.add_argument("--setup-only", action="store_true", help="install and convert, measure nothing")
    options = parser.parse_args()
    options.model = resolve_model(options.model, cache_folder(), notify=say)
    return options


class Command:
    """How to start a contender for one round."""

    def __init__(self, words: Sequence[str | Path], parse: Any, environment: Mapping[str, str] | None = None) -> None:
        self.words = [str(word) for word in words]
        self.parse = parse
        self.environment = dict(environment or {})


def prepare(
    rows: Sequence[Contender], environments: Environments, work: Work, options: argparse.Namespace
) -> tuple[dict[Contender, Any], dict[Contender, str], list[str]]:
    """What to start for each row, why some cannot be started, and notes for the reader."""
    problems: dict[Contender, str] = {}
    notes: list[str] = []
    unusable: dict[str, str] = {}
    for rival in RIVALS:
        if any(row.engine == rival.name for row in rows):
            try:
                note = environments.prepare(rival)
            except SetupError as error:
                unusable[rival.name] = f"could not be installed: {error}"
            else:
                notes += [note] if note else []
    commands: dict[Contender, Any] = {}
    for row in rows:
        if row.engine in unusable:
            problems[row] = unusable[row.engine]
            continue
        try:
            commands[row] = make_command(row, environments, work, options)
        except SetupError as error:
            problems[row] = str(error)
    return commands, problems, notes


def make_command(row: Contender, environments: Environments, work: Work, options: argparse.Namespace) -> Any:
    """A function from the round's number to its command."""
    if row.is_shoal:
        return lambda number: Command(shoal_command(PROGRAM, options.model, row.weights, work, number), parse_shoal)
    if row.engine == LLAMA_CPP:
        binaries = environments.binaries()
        words = llama_cpp_command(binaries, environments.model(row.weights), work)
        return lambda number: Command(words, parse_llama_cpp, {"LD_LIBRARY_PATH": str(binaries)})
    if row.engine == OPENVINO:
        driver, model = HERE / "drive_openvino.py", environments.model(row.weights)
    else:
        driver, model = HERE / "drive_vllm.py", environments.hugging_face_folder()
    python = environments.python(row.engine)

    def driven(number: int) -> Command:
        values = {**asdict(work), "seed": number}
        given = options.output / "work.json"
        given.parent.mkdir(parents=True, exist_ok=True)
        given.write_text(json.dumps(values), encoding="utf-8")
        # Programs of the environment (compilers, say) are found by name.
        path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return Command([python, driver, model, given], parse_driver, {"PATH": path})

    return driven


def run_one(row: Contender, make: Any, number: int, options: argparse.Namespace) -> Run:
    """One contender's round, with whatever it printed before it failed."""
    command: Command = make(number)
    process = subprocess.Popen(
        [*shlex.split(options.under), *command.words],
        env={**os.environ, **command.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its own children go with it when it is stopped
    )
    error = None
    try:
        output, complaint = process.communicate(timeout=options.limit)
        if process.returncode:
            error = describe_exit(process.returncode, complaint)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        error = f"stopped after {options.limit:.0f} s"
    run: Run = command.parse(output)
    for batch, speed in run.speeds.items():
        say(f"  B={batch}: prefill {speed.prefill:.0f}, decode {speed.decode:.0f}")
    if error is not None:
        say(f"  {row.name}: {error}")
    return replace(run, error=error)


def quality(
    rows: Sequence[Contender], environments: Environments, options: argparse.Namespace
) -> dict[Contender, float | None]:
    """What each row's weights do to the perplexity."""
    base = perplexity(options.model, "f32")
    found: dict[tuple[str, str], float | None] = {}
    for row in rows:
        key = (row.weights, "") if not row.is_shoal else ("", row.weights)
        if key in found or base is None:
            continue
        say(f"perplexity: {row.name}")
        try:
            model = options.model if row.is_shoal else environments.model(row.weights)
        except SetupError:
            continue
        value = perplexity(model, row.weights if row.is_shoal else "f32")
        found[key] = None if value is None else value / base - 1
    return {row: found.get(("", row.weights) if row.is_shoal else (row.weights, "")) for row in rows}


def perplexity(model: Path, precision: str) -> float | None:
    """By ``shoal eval``; None if that fails."""
    words = [str(PROGRAM), "eval", "-m", str(model), "--text", str(TEXT), "--precision", precision]
    words += ["--max-windows", QUALITY_WINDOWS, "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        say(f"  {describe_exit(done.returncode, done.stderr)}")
        return None
    return float(json.loads(done.stdout)["perplexity"])


def make_record(
    runs: Mapping[Contender, Sequence[Run]],
    *,
    problems: Mapping[Contender, str],
    notes: Sequence[str],
    work: Work,
    options: argparse.Namespace,
    changes: Mapping[Contender, float | None],
) -> dict[str, Any]:
    """Everything measured; the table and the chart are made of it."""
    items = []
    for row, own in runs.items():
        outcome = combine(own)
        items.append(
            {
                "name": row.name,
                "engine": row.engine,
                "weights": row.weights,
                "perplexity_change": changes[row],
                "decode": {str(batch): asdict(value) for batch, value in outcome.decode.items()},
                "prefill": {str(batch): asdict(value) for batch, value in outcome.prefill.items()},
                "startup_s": outcome.startup_s,
                "error": problems.get(row, outcome.error),
            }
        )
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "shoal": shoal_version(),
        "machine": machine_facts(available_isas()),
        "model": options.model.stem,
        "batches": list(work.batches),
        "prompt_len": work.prompt_len,
        "output_len": work.output_len,
        "threads": work.threads,
        "rounds": options.rounds,
        "notes": list(notes),
        "rows": items,
    }


def write(record: Mapping[str, Any], folder: Path) -> None:
    """peers.json, peers.md and peers.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "peers.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "peers.md").write_text(markdown(record), encoding="utf-8")
    (folder / "peers.svg").write_text(svg(record), encoding="utf-8")
    print(markdown(record))


if __name__ == "__main__":
    main()
