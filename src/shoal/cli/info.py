"""``shoal info``: what would run here, with which defaults, and why."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence

import typer

from shoal.cli.console import make_console, note
from shoal.cli.options import DEFAULT_MODEL, Json, Model, takes_engine_options
from shoal.config import EngineConfig


@takes_engine_options
def info(*, engine: EngineConfig, model: Model = DEFAULT_MODEL, as_json: Json = False) -> None:
    """Show the machine, the model and every option as resolved, with its reason."""
    from shoal.assembly import kv_bytes_per_token, load_model
    from shoal.backends.memory import available_memory
    from shoal.cli.loading import fetch_if_missing
    from shoal.kernels.native import available_isas

    fetch_if_missing(model)
    loaded = load_model(model, engine, notify=note)
    backend, description = loaded.backend, loaded.description
    free = available_memory()
    machine = {
        "processor": platform.machine(),
        "instruction_sets": list(available_isas()),
        "available_memory_bytes": free,
    }
    facts = {
        "name": loaded.name,
        "path": str(loaded.path),
        "architecture": description.architecture,
        "layers": description.num_layers,
        "hidden_size": description.hidden_size,
        "ffn_size": description.ffn_size,
        "heads": description.num_heads,
        "kv_heads": description.num_kv_heads,
        "head_dim": description.head_dim,
        "vocabulary": description.vocab_size,
        "context_length": description.context_length,
        "chat_template": loaded.chat_template is not None,
    }
    memory = {
        "weights_bytes": backend.weight_bytes,
        "kv_cache_bytes": backend.cache_bytes,
        "kv_bytes_per_token": kv_bytes_per_token(description, loaded.config.kv_dtype),
        "activations_bytes": backend.buffer_bytes,
    }
    options = [{"name": name, "value": value, "reason": reason} for name, value, reason in loaded.decisions]
    backend.close()
    if as_json:
        typer.echo(json.dumps({"machine": machine, "model": facts, "memory": memory, "options": options}))
        return
    _print(machine, facts, memory, options)


def _print(
    machine: Mapping[str, object],
    facts: Mapping[str, object],
    memory: Mapping[str, object],
    options: Sequence[Mapping[str, str]],
) -> None:
    from rich.table import Table

    console = make_console(stderr=False)
    for title, values in (("Machine", machine), ("Model", facts), ("Memory", memory)):
        table = Table(title=title, show_header=False, title_justify="left")
        for name, value in values.items():
            table.add_row(name.replace("_", " ").removesuffix(" bytes"), _text(name, value))
        console.print(table)
    table = Table(title="Options", title_justify="left")
    for name in ("option", "value", "why"):
        table.add_column(name)
    for option in options:
        table.add_row(option["name"], option["value"], option["reason"])
    console.print(table)


def _text(name: str, value: object) -> str:
    if name.endswith("bytes") and isinstance(value, int):
        return f"{value / 2**20:.1f} MiB"
    if name == "kv_bytes_per_token" and isinstance(value, int):
        return f"{value / 1024:.1f} KiB"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return str(value)
