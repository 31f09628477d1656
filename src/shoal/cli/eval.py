"""``shoal eval``: what a precision costs in quality on a text."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.console import make_console, note
from shoal.cli.options import DEFAULT_MODEL, Json, Model, takes_engine_options
from shoal.config import EngineConfig
from shoal.errors import InvalidRequestError

CHUNK = 128


@takes_engine_options
def evaluate(
    *,
    engine: EngineConfig,
    text: Annotated[str, typer.Option(metavar="FILE", help="UTF-8 text to score; '-' reads standard input.")],
    model: Model = DEFAULT_MODEL,
    window: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 1024,
    run_in: Annotated[int, typer.Option(min=1, help="Tokens of each window that are context only.")] = 256,
    max_windows: Annotated[int | None, typer.Option(min=1, help="Score only so many windows.")] = None,
    as_json: Json = False,
) -> None:
    """Compare a precision with float32 on a text: perplexity, KL divergence, agreement on the best token."""
    from rich.progress import Progress

    from shoal.assembly import build_backend, open_model
    from shoal.cli.loading import fetch_if_missing
    from shoal.evaluation import evaluate as run_evaluation
    from shoal.text.tokenizer import Tokenizer, TokenizerSpec

    source = _read(text)
    fetch_if_missing(model)
    file_model, config, file = open_model(model, engine, notify=note)
    limit = config.context_length or file_model.description.context_length
    if window > limit:
        raise InvalidRequestError("window", f"the context holds {limit} tokens, got {window}")
    token_ids = Tokenizer(TokenizerSpec.from_gguf(file.metadata, path=str(file.path))).encode(source)
    # Scoring needs one sequence at a time, all of whose rows are sampled.
    size = -(-window // config.block_size) * config.block_size
    scheme = replace(config, max_num_seqs=CHUNK, token_budget=CHUNK, kv_tokens=size, context_length=window)
    precise = replace(scheme, precision="f32", kv_dtype="f32")
    with Progress(console=make_console(), transient=True) as bar:
        task = bar.add_task("scoring", total=None)
        quality = run_evaluation(
            build_backend(file_model, precise),
            build_backend(file_model, scheme),
            token_ids,
            window=window,
            run_in=run_in,
            max_windows=max_windows,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    record = {
        "precision": config.precision,
        "kv_dtype": config.kv_dtype,
        "tokens": quality.tokens,
        "perplexity": quality.perplexity,
        "reference_perplexity": quality.reference_perplexity,
        "change": quality.change,
        "kl": quality.kl,
        "top1": quality.top1,
    }
    if as_json:
        typer.echo(json.dumps(record))
        return
    console = make_console(stderr=False)
    console.print(f"precision {config.precision}, KV cache {config.kv_dtype}, {quality.tokens} tokens scored")
    console.print(
        f"perplexity {quality.perplexity:.4f}, float32 {quality.reference_perplexity:.4f} ({quality.change:+.3%})"
    )
    console.print(f"KL divergence {quality.kl:.5f} nats, same best token {quality.top1:.2%}")


def _read(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise InvalidRequestError("text", f"cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError("text", f"{name} is not UTF-8: byte {error.start} is {error.reason}") from error
