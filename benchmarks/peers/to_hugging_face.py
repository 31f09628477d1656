"""Writes a llama model from a GGUF file as a Hugging Face folder in bfloat16: `to_hugging_face.py MODEL.gguf FOLDER`.

Runs in vLLM's environment, which has torch, safetensors and gguf. Only what random token ids need: no chat template, no
special tokens' names.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file

OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def halves_together(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the two halves of each head's rotation; Hugging Face keeps them apart."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, columns)


def main(source: str, folder: Path) -> None:
    reader = gguf.GGUFReader(source)

    def field(name: str):
        return reader.fields[name].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    tensors = {}
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        name = OUTSIDE.get(tensor.name)
        if name is None:
            _, layer, role, kind = tensor.name.split(".")
            name = f"model.layers.{layer}.{INSIDE[role]}.{kind}"
            if role in ("attn_q", "attn_k"):
                values = halves_together(values, heads if role == "attn_q" else kv_heads)
        tensors[name] = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = field("tokenizer.ggml.tokens")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": field("llama.rope.freq_base"),
        "vocab_size": len(tokens),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
    }
    write(folder / "config.json", config)
    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.save(str(folder / "tokenizer.json"))
    write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def write(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
