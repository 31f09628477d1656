"""The CPU backend: a plan becomes arrays, the arrays one native call, its results the plan's values again.

At construction the model's forward pass is recorded into a native program (see ``kernels.native``); after that a step
runs no Python per operation and allocates nothing in native code. The KV cache lives inside the program.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.backends.step_arrays import StepArrays
from shoal.core.grammar import GrammarSpec
from shoal.core.plan import CacheShape, StepPlan, StepResult
from shoal.core.scheduler import SCORE_BUDGET
from shoal.errors import EngineClosedError, KernelError
from shoal.grammar.compiler import GrammarCompiler
from shoal.grammar.states import GrammarStates
from shoal.grammar.vocabulary import LoadVocabulary
from shoal.kernels.native import _native
from shoal.kernels.native.recorder import NativeOps
from shoal.models.dequantize import dequantize
from shoal.models.description import LlamaWeights, ModelDescription
from shoal.models.llama import forward
from shoal.sampling.batch import SamplingPacker
from shoal.sampling.results import SampledRows, entry_results

# Kinds of operation in the order of the native enumeration.
OPERATION_KINDS = (
    "embed",
    "rms_norm",
    "linear",
    "rope_and_cache",
    "attention",
    "silu_mul",
    "add",
    "gather",
    "convert",
    "sample",
)


class CpuBackend:
    """Implements ``Backend`` on the native kernels.

    precision: "f32", "bf16", "int8", "int4" or "native". kv_dtype: "f32", "bf16" or "int8". isa: one of
    ``available_isas()``.
    max_num_seqs bounds the entries of a plan, token_budget its rows, score_budget those scored.
    vocabulary: for constraints; without one they are refused.
    """

    def __init__(
        self,
        model: ModelDescription,
        weights: LlamaWeights,
        *,
        precision: str,
        kv_dtype: str,
        isa: str,
        threads: int,
        num_blocks: int,
        block_size: int,
        context_length: int,
        max_num_seqs: int,
        token_budget: int,
        score_budget: int = SCORE_BUDGET,
        vocabulary: LoadVocabulary | None = None,
    ) -> None:
        self._model = model
        self._context_length = context_length
        self._max_num_seqs = max_num_seqs
        self._max_rows = max(token_budget, max_num_seqs)
        self._cache_shape = CacheShape(
            num_blocks=num_blocks,
            block_size=block_size,
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=kv_dtype,
        )
        program = _native.Program(
            isa=isa,
            max_rows=self._max_rows,
            max_samples=max_num_seqs + score_budget,
            max_sequences=max_num_seqs,
            max_context=context_length,
            vocab=model.vocab_size,
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            threads=threads,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            cache_type=kv_dtype,
        )
        ops = NativeOps(program, precision=precision, max_context=context_length, dequantize=dequantize)
        ops.seal(forward(ops, model, weights))
        self._program: _native.Program | None = program
        self._arrays = StepArrays(block_size)
        self._packer = SamplingPacker()
        self._grammars = GrammarStates(vocabulary and GrammarCompiler(vocabulary, model.vocab_size), threads=threads)

    @property
    def cache_shape(self) -> CacheShape:
        """The cache as built."""
        return self._cache_shape

    @property
    def vocab_size(self) -> int:
        """The model's."""
        return self._model.vocab_size

    @property
    def context_length(self) -> int:
        """Longest sequence: the model's, or what the configuration cut it to."""
        return self._context_length

    @property
    def weight_bytes(self) -> int:
        """Memory of the packed weights."""
        return self._open().weight_bytes

    @property
    def cache_bytes(self) -> int:
        """Memory set aside for the KV cache; it becomes resident as it is used."""
        return self._open().cache_bytes

    @property
    def buffer_bytes(self) -> int:
        """Memory set aside for activations."""
        return self._open().buffer_bytes

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step natively. KernelError if the plan does not fit what the program was built for."""
        program = self._open()
        inputs = self._arrays.to_step_inputs(plan)
        masks = self._grammars.masks(plan.entries)
        batch = self._packer.pack(plan.entries, masks.bits, masks.rows)
        sampled = SampledRows.empty(batch)
        error = program.step(
            inputs.token_ids,
            inputs.positions,
            inputs.row_starts,
            inputs.block_tables,
            inputs.sample_rows,
            batch.rows.view(np.uint8),
            batch.bias_ids,
            batch.bias_values,
            batch.banned_ids,
            batch.history,
            batch.masks,
            sampled.results.view(np.uint8),
            sampled.top_ids,
            sampled.top_logprobs,
        )
        if error:
            raise KernelError(error)
        return StepResult(self._grammars.take_all(plan.entries, entry_results(plan.entries, batch, sampled), masks))

    def check_grammar(self, spec: GrammarSpec) -> object:
        """Compile a constraint, or refuse it."""
        return self._grammars.check(spec)

    def forget(self, seq_id: int) -> None:
        """Drop what is kept for a sequence."""
        self._arrays.forget(seq_id)
        self._packer.forget(seq_id)
        self._grammars.forget(seq_id)

    def close(self) -> None:
        """Stop the threads and free all memory."""
        self._program = None

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits [len(token_ids), vocab] after each token of one text.

        Uses the cache from its first block on, so only on a backend that nobody else is using.
        """
        program = self._open()
        size = self._cache_shape.block_size
        num_blocks = -(-len(token_ids) // size)
        if num_blocks > self._cache_shape.num_blocks or len(token_ids) > self._context_length:
            raise KernelError(
                f"{len(token_ids)} tokens fit neither the context of {self._context_length} nor the cache of "
                f"{self._cache_shape.num_tokens}"
            )
        table = np.arange(num_blocks, dtype=np.int32)[None, :]
        out = np.empty((len(token_ids), self.vocab_size), dtype=np.float32)
        chunk_rows = min(self._max_num_seqs, self._max_rows)
        for start in range(0, len(token_ids), chunk_rows):
            chunk = np.array(token_ids[start : start + chunk_rows], dtype=np.int32)
            rows = np.arange(len(chunk), dtype=np.int32)
            error = program.logits(
                chunk,
                rows + np.int32(start),
                np.array([0, len(chunk)], dtype=np.int32),
                table,
                rows,
                out[start : start + len(chunk)],
            )
            if error:
                raise KernelError(error)
        return out

    def last_times(self) -> dict[str, float]:
        """Seconds of the last step by kind of operation, on the engine's thread, waiting included."""
        return {kind: ns * 1e-9 for kind, ns in zip(OPERATION_KINDS, self._open().last_times(), strict=True)}

    def _open(self) -> _native.Program:
        if self._program is None:
            raise EngineClosedError("the backend was closed")
        return self._program
