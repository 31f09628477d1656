"""From a model's name to something to measure: a backend as large as the work needs, and what a step of it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.assembly import KV_MEMORY_SHARE, build_backend, kv_bytes_per_token, open_model
from shoal.backends.memory import available_memory
from shoal.bench.engine import Subject, check_fit
from shoal.bench.work import Work
from shoal.config import EngineConfig
from shoal.core.params import SamplingParams
from shoal.errors import ConfigError
from shoal.kernels.native.formats import choose_format
from shoal.kernels.ops import WeightTensor
from shoal.models.description import Model
from shoal.perf.ceilings import usable_cores
from shoal.perf.paths import attention_path, matmul_path
from shoal.perf.step_cost import Matrix, ModelCost, model_cost
from shoal.text.tokenizer import Tokenizer, TokenizerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSubject:
    """A subject, with what is worth recording about it."""

    subject: Subject
    path: Path
    config: EngineConfig
    weight_bytes: int


def load_subject(
    model: str | Path,
    config: EngineConfig,
    work: Work,
    batches: Sequence[int],
    params: SamplingParams,
    *,
    notify: Callable[[str], None] | None = None,
) -> LoadedSubject:
    """Read and pack a model for this work.

    Raises as ``open_model`` does, and ConfigError for work that fits neither the model's context nor memory.
    """
    found, resolved, file = open_model(model, config, notify=notify)
    size = resolved.block_size
    blocks = max(work.blocks(batch, size) for batch in batches)
    check_fit(work, batches, resolved.context_length or found.description.context_length, blocks, size)
    per_token = kv_bytes_per_token(found.description, resolved.kv_dtype)
    _check_memory(work, batches, size, per_token)
    fitted = replace(resolved, max_num_seqs=max(batches), kv_tokens=blocks * size, prefix_caching=False)
    if fitted.threads is None:
        raise ConfigError("threads", "must be resolved first")
    backend = build_backend(found, fitted)
    cost = _cost(found, fitted, backend.weight_bytes, per_token)
    subject = Subject(
        backend=backend,
        kernel_times=backend.last_times,
        tokenizer=Tokenizer(TokenizerSpec.from_gguf(file.metadata, path=str(file.path))),
        cost=cost,
        params=params,
        token_budget=fitted.token_budget,
        threads=fitted.threads,
        cores=usable_cores(),
    )
    return LoadedSubject(
        subject=subject,
        path=file.path,
        config=fitted,
        weight_bytes=backend.weight_bytes,
    )


def _check_memory(work: Work, batches: Sequence[int], block_size: int, per_token: int) -> None:
    free = available_memory()
    if free is None:
        return
    for batch in batches:
        needed = work.blocks(batch, block_size) * block_size * per_token
        if needed > KV_MEMORY_SHARE * free:
            raise ConfigError(
                "batch",
                f"{batch} sequences of {work.longest} tokens need {needed / 2**20:.0f} MiB of KV cache, but of the "
                f"{free / 2**20:.0f} MiB of free memory at most {KV_MEMORY_SHARE:.0%} go there; "
                "lower batch or the lengths",
            )


def _cost(model: Model, config: EngineConfig, weight_bytes: int, kv_bytes: int) -> ModelCost:
    description, weights = model

    def matrix(weight: WeightTensor, *, head: bool = False) -> Matrix:
        path = matmul_path(config.isa, choose_format(weight, config.precision, head=head))
        return Matrix(weight.shape[0], weight.shape[1], path)

    body = [
        matrix(weight)
        for layer in weights.layers
        for weight in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)
    ]
    return model_cost(
        body=body,
        head=matrix(weights.output, head=True),
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv_bytes,
        num_layers=description.num_layers,
        num_heads=description.num_heads,
        head_dim=description.head_dim,
        attention_path=attention_path(config.isa, config.kv_dtype),
    )
