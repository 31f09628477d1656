from numpy import float32, int32, uint8, uint32
from numpy.typing import NDArray

def available_isas() -> list[str]: ...

class Program:
    def __init__(
        self,
        *,
        isa: str,
        max_rows: int,
        max_samples: int,
        max_sequences: int,
        max_context: int,
        vocab: int,
        num_layers: int,
        num_heads: int,
        threads: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        cache_bf16: bool,
    ) -> None: ...
    def add_weight(self, parts: list[tuple[int, NDArray[uint8]]], features: int, format: int) -> tuple[str, int]: ...
    def add_vector(self, values: NDArray[float32]) -> int: ...
    def add_buffer(self, width: int, per_sample: bool) -> int: ...
    def embed(self, type: int, table: NDArray[uint8], width: int, out: int) -> str: ...
    def rms_norm(self, input: int, out: int, weight: int, eps: float) -> str: ...
    def linear(self, input: int, out: int, column: int, weight: int, bias: int, residual: int) -> str: ...
    def rope_and_cache(
        self, qkv: int, out: int, layer: int, cos_sin: int, rotary_dim: int, interleaved: bool
    ) -> str: ...
    def attention(self, query: int, out: int, layer: int, scale: float) -> str: ...
    def silu_mul(self, input: int, out: int) -> str: ...
    def add(self, a: int, b: int, out: int) -> str: ...
    def gather(self, input: int, out: int) -> str: ...
    def seal(self, logits: int) -> str: ...
    def step(
        self,
        token_ids: NDArray[int32],
        positions: NDArray[int32],
        row_starts: NDArray[int32],
        block_tables: NDArray[int32],
        sample_rows: NDArray[int32],
        params: NDArray[uint8],
        bias_ids: NDArray[int32],
        bias_values: NDArray[float32],
        banned_ids: NDArray[int32],
        history: NDArray[int32],
        masks: NDArray[uint32],
        results: NDArray[uint8],
        top_ids: NDArray[int32],
        top_logprobs: NDArray[float32],
    ) -> str: ...
    def logits(
        self,
        token_ids: NDArray[int32],
        positions: NDArray[int32],
        row_starts: NDArray[int32],
        block_tables: NDArray[int32],
        sample_rows: NDArray[int32],
        out: NDArray[float32],
    ) -> str: ...
    def last_times(self) -> list[int]: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def buffer_bytes(self) -> int: ...
    @property
    def cache_bytes(self) -> int: ...
