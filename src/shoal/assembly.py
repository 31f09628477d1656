"""From a model's name and a configuration to something that can run: the one place where the parts are put together.

Every default that depends on the model or the machine is decided here, once, and each decision keeps its reason;
``shoal info`` prints them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from shoal.backends.cpu import CpuBackend
from shoal.backends.memory import available_memory
from shoal.config import EngineConfig, cache_folder
from shoal.errors import ConfigError, KernelError
from shoal.grammar.vocabulary import LoadVocabulary, Vocabulary
from shoal.kernels.native import available_isas, choose_isa
from shoal.kernels.native.formats import Format, choose_format
from shoal.kernels.ops import WeightTensor
from shoal.models import GGUFFile, Model, describe
from shoal.models.catalog import resolve_model
from shoal.models.description import LlamaWeights, ModelDescription
from shoal.text.chat_template import ChatTemplate
from shoal.text.tokenizer import Tokenizer, TokenizerSpec

# Of the memory that is free, at most this part goes to the KV cache by default.
KV_MEMORY_SHARE = 0.5
LEAST_KV_TOKENS = 16384


class Decision(NamedTuple):
    """One option as resolved, and why."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. ``config`` has no "auto" and no None left in it."""

    name: str
    path: Path
    description: ModelDescription
    backend: CpuBackend
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    context_length: int
    config: EngineConfig
    decisions: tuple[Decision, ...]


def load_model(
    model: str | Path, config: EngineConfig | None = None, *, notify: Callable[[str], None] | None = None
) -> LoadedModel:
    """Find (pulling it if it is a known name), read and pack a model.

    Raises ModelNotFoundError, ModelFileError, UnsupportedModelError, ConfigError for options that the model or the
    machine cannot meet, KernelError for an instruction set that is not there.
    """
    file = GGUFFile.open(resolve_model(model, cache_folder(), notify=notify))
    # The tokenizer and the weights have nothing in common, and both release the interpreter while they work.
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(_load_text, file)
        found = describe(file)
        resolved, decisions = resolve_config(found, config or EngineConfig())
        backend = build_backend(found, resolved, lambda: _vocabulary(text.result()[0]))
        tokenizer, template = text.result()
    return LoadedModel(
        name=str(model),
        path=file.path,
        description=found.description,
        backend=backend,
        tokenizer=tokenizer,
        chat_template=template,
        context_length=backend.context_length,
        config=resolved,
        decisions=decisions,
    )


def open_model(
    model: str | Path, config: EngineConfig, *, notify: Callable[[str], None] | None = None
) -> tuple[Model, EngineConfig, GGUFFile]:
    """A model's description and weights with the resolved configuration, for callers that build their own backends."""
    file = GGUFFile.open(resolve_model(model, cache_folder(), notify=notify))
    found = describe(file)
    return found, resolve_config(found, config)[0], file


def build_backend(model: Model, config: EngineConfig, vocabulary: LoadVocabulary | None = None) -> CpuBackend:
    """The backend of a resolved configuration (see ``resolve_config``); without a vocabulary it refuses constraints."""
    if config.threads is None or config.kv_tokens is None or config.context_length is None:
        raise ConfigError("config", "must be resolved first")
    return CpuBackend(
        model.description,
        model.weights,
        precision=config.precision,
        kv_dtype=config.kv_dtype,
        isa=config.isa,
        threads=config.threads,
        num_blocks=config.kv_tokens // config.block_size,
        block_size=config.block_size,
        context_length=config.context_length,
        max_num_seqs=config.max_num_seqs,
        token_budget=config.token_budget,
        vocabulary=vocabulary,
    )


def resolve_config(model: Model, config: EngineConfig) -> tuple[EngineConfig, tuple[Decision, ...]]:
    """Replace every "auto" and None by a value for this model on this machine."""
    description = model.description
    decisions: list[Decision] = []

    def decide(name: str, value: object, reason: str) -> None:
        decisions.append(Decision(name, str(value), reason))

    precision, reason = _precision(model.weights, config)
    decide("precision", precision, reason)

    kv_dtype, reason = config.kv_dtype, "as asked"
    if kv_dtype == "auto":
        kv_dtype, reason = {
            "f32": ("f32", "as exact as the weights"),
            "bf16": ("bf16", "as exact as the weights"),
        }.get(precision, ("int8", "half the memory of bfloat16, for 0.1 % of perplexity on the default model"))
    decide("kv_dtype", kv_dtype, reason)

    try:
        isa = choose_isa(config.isa)
    except KernelError as error:
        raise ConfigError("isa", str(error)) from error
    decide("isa", isa, "as asked" if config.isa != "auto" else f"the best of {', '.join(available_isas())}")

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = config.threads or cores
    decide("threads", threads, "as asked" if config.threads else "one per core this process may use")

    context = config.context_length or description.context_length
    if context > description.context_length:
        raise ConfigError("context_length", f"the model was made for {description.context_length}, got {context}")
    decide("context_length", context, "as asked" if config.context_length else "the model's own")

    kv_tokens, reason = _kv_tokens(description, config, kv_dtype, context)
    decide("kv_tokens", kv_tokens, reason)
    for name, value, why in (
        ("block_size", config.block_size, "small blocks waste little and share prefixes finely"),
        ("max_num_seqs", config.max_num_seqs, "past this a CPU's arithmetic is full and only latency grows"),
        ("token_budget", config.token_budget, "bounds how long a prefill chunk can hold up the decodes beside it"),
        ("policy", config.policy, "higher priorities first; among equals, first come, first served"),
        ("priority_ageing", config.priority_ageing, "seconds of waiting worth a level: low priority is not starved"),
        ("prefix_caching", config.prefix_caching, "equal prefixes are computed once; results are the same bits"),
        ("max_waiting", config.max_waiting, "a bounded queue refuses work it would serve too late"),
    ):
        decide(name, value, why if value == getattr(EngineConfig(), name) else "as asked")

    resolved = replace(
        config,
        precision=precision,
        kv_dtype=kv_dtype,
        isa=isa,
        threads=threads,
        context_length=context,
        kv_tokens=kv_tokens,
    )
    return resolved, tuple(decisions)


def kv_bytes_per_token(description: ModelDescription, kv_dtype: str) -> int:
    """Bytes that one token takes in the cache, over all layers: heads padded to 16 dimensions, scales included."""
    padded = -(-description.head_dim // 16) * 16
    per_head = {"f32": 4 * padded, "bf16": 2 * padded, "int8": padded + 4}[kv_dtype]
    return 2 * description.num_layers * description.num_kv_heads * per_head


_PRECISION_COSTS = {
    "f32": "exact, and reads four bytes per weight",
    "bf16": "no measurable loss, reads two bytes per weight; the fastest for large batches where there is AMX",
    "int8": "8 bits with one scale per output: about 0.7 % of perplexity on the default model",
    "int4": "4 bits in groups of 32, as in the file where it has them: about 0.35 % of perplexity on the default model",
    "native": "the file's own blocks, with activations in 8 bits per 32",
}


def _precision(weights: LlamaWeights, config: EngineConfig) -> tuple[str, str]:
    if config.precision != "auto":
        return config.precision, f"as asked; {_PRECISION_COSTS[config.precision]}"
    formats = {choose_format(weight, "native") for weight in _matrices(weights)}
    if formats & (set(Format) - {Format.F32, Format.BF16}):
        return "native", (
            "the file is quantized: its own blocks are the fewest bytes, with activations in 8 bits per 32 "
            "(+0.35 % perplexity on the default model)"
        )
    if Format.BF16 in formats:
        return "bf16", "the file is in bfloat16"
    return "f32", "the file holds float weights that bfloat16 would round"


def _matrices(weights: LlamaWeights) -> list[WeightTensor]:
    found = [weights.output]
    for layer in weights.layers:
        found += [layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down]
    return found


def _kv_tokens(description: ModelDescription, config: EngineConfig, kv_dtype: str, context: int) -> tuple[int, str]:
    block = config.block_size
    if config.kv_tokens is not None:
        tokens = config.kv_tokens // block * block
        if tokens < block:
            raise ConfigError("kv_tokens", f"must hold at least one block of {block} tokens, got {config.kv_tokens}")
        return tokens, "as asked, in whole blocks"
    wanted = max(LEAST_KV_TOKENS, 2 * context)
    per_token = kv_bytes_per_token(description, kv_dtype)
    free = available_memory()
    reason = f"two full contexts, at least {LEAST_KV_TOKENS}"
    if free is not None and wanted * per_token > KV_MEMORY_SHARE * free:
        wanted = int(KV_MEMORY_SHARE * free) // per_token
        reason = f"half of the {free / 2**20:.0f} MiB of memory that are free"
    tokens = max(1, wanted // block) * block
    return tokens, f"{reason}; {per_token / 1024:.1f} KiB a token, {tokens * per_token / 2**20:.0f} MiB in all"


def _load_text(file: GGUFFile) -> tuple[Tokenizer, ChatTemplate | None]:
    tokenizer = Tokenizer(TokenizerSpec.from_gguf(file.metadata, path=str(file.path)))
    source = file.metadata.get("tokenizer.chat_template")
    if not isinstance(source, str):
        return tokenizer, None
    return tokenizer, ChatTemplate(
        source,
        bos_token=_token_text(tokenizer, tokenizer.bos_id),
        eos_token=_token_text(tokenizer, tokenizer.eos_id),
        control_texts=tokenizer.control_texts,
    )


def _vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer.plain_bytes(), tokenizer.encode_fragment)


def _token_text(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_text(token_id)
