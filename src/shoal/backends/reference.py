"""The backend that computes on the reference operations: slow, clear, and what the native one is measured against."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.backends.step_arrays import StepArrays
from shoal.core.grammar import GrammarSpec
from shoal.core.plan import CacheShape, StepPlan, StepResult
from shoal.errors import ConfigError, EngineClosedError
from shoal.grammar.compiler import GrammarCompiler
from shoal.grammar.states import GrammarStates
from shoal.grammar.vocabulary import LoadVocabulary
from shoal.kernels.ops import StepInputs
from shoal.kernels.reference import FloatArray, ReferenceCache, ReferenceOps, ReferenceWeights
from shoal.models.dequantize import dequantize
from shoal.models.description import LlamaWeights, ModelDescription
from shoal.models.llama import forward
from shoal.sampling.batch import SamplingPacker
from shoal.sampling.reference import sample_rows
from shoal.sampling.results import entry_results

EVALUATION_ROWS = 256


class ReferenceBackend:
    """Implements ``Backend`` in NumPy.

    precision: "f32", "bf16" or "native", as ``kernels.reference`` defines them.
    kv_dtype: "f32" or "bf16"; None is f32 for precision f32, else bf16.
    vocabulary: for constraints; without one they are refused.
    """

    def __init__(
        self,
        model: ModelDescription,
        weights: LlamaWeights,
        *,
        num_blocks: int,
        block_size: int = 16,
        precision: str = "f32",
        kv_dtype: str | None = None,
        vocabulary: LoadVocabulary | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError("num_blocks", f"needs at least one block of one token, got {num_blocks} of {block_size}")
        self._model = model
        self._weights = weights
        self._expanded = ReferenceWeights(dequantize, precision)
        self._cache_shape = CacheShape(
            num_blocks=num_blocks,
            block_size=block_size,
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=kv_dtype or ("f32" if precision == "f32" else "bf16"),
        )
        self._cache: ReferenceCache | None = self._new_cache(num_blocks)
        self._arrays = StepArrays(block_size)
        self._packer = SamplingPacker()
        self._grammars = GrammarStates(vocabulary and GrammarCompiler(vocabulary, model.vocab_size))

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
        """The model's."""
        return self._model.context_length

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the model over all rows, then choose a token for each entry that samples."""
        if self._cache is None:
            raise EngineClosedError("the reference backend was closed")
        inputs = self._arrays.to_step_inputs(plan)
        logits = self._forward(inputs, self._cache)
        masks = self._grammars.masks(plan.entries)
        batch = self._packer.pack(plan.entries, masks.bits, masks.rows)
        results = entry_results(plan.entries, batch, sample_rows(logits, batch))
        return StepResult(self._grammars.take_all(plan.entries, results, masks))

    def check_grammar(self, spec: GrammarSpec) -> object:
        """Compile a constraint, or refuse it."""
        return self._grammars.check(spec)

    def forget(self, seq_id: int) -> None:
        """Drop the sequence's block table and sampling state."""
        self._arrays.forget(seq_id)
        self._packer.forget(seq_id)
        self._grammars.forget(seq_id)

    def close(self) -> None:
        """Free the cache and the expanded weights."""
        self._cache = None
        self._expanded = ReferenceWeights(dequantize, self._expanded.precision)

    def logits(self, token_ids: Sequence[int]) -> FloatArray:
        """Logits [len(token_ids), vocab] after each token of one text, in a cache of its own."""
        size = self._cache_shape.block_size
        num_blocks = -(-len(token_ids) // size)
        cache = self._new_cache(num_blocks)
        table = np.arange(num_blocks, dtype=np.int32)[None, :]
        out = np.empty((len(token_ids), self.vocab_size), dtype=np.float32)
        for start in range(0, len(token_ids), EVALUATION_ROWS):
            chunk = np.array(token_ids[start : start + EVALUATION_ROWS], dtype=np.int32)
            rows: NDArray[np.int32] = np.arange(len(chunk), dtype=np.int32)
            inputs = StepInputs(
                token_ids=chunk,
                positions=rows + np.int32(start),
                row_starts=np.array([0, len(chunk)], dtype=np.int32),
                block_tables=table,
                sample_rows=rows,
            )
            out[start : start + len(chunk)] = self._forward(inputs, cache)
        return out

    def _forward(self, inputs: StepInputs, cache: ReferenceCache) -> FloatArray:
        return forward(ReferenceOps(inputs, cache, self._expanded), self._model, self._weights)

    def _new_cache(self, num_blocks: int) -> ReferenceCache:
        shape = self._cache_shape
        return ReferenceCache(
            num_layers=shape.num_layers,
            num_blocks=num_blocks,
            block_size=shape.block_size,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
        )
