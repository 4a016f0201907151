"""What Llama, Mistral, Qwen2 and Qwen3 share: rotary positions, RMSNorm, SwiGLU, grouped queries; their keys of config.json
and the names of their tensors."""

from __future__ import annotations

from typing import Any

from megakit.config.schema import ModelConfig
from megakit.errors import Refused
from model_zoo.family import need, required
from model_zoo.rope import read_rope, write_rope

PREFIX = "model."
MODULES: dict[str, tuple[str, ...]] = {
    "embedding.word": ("model.embed_tokens",),
    "layers.N.attention_norm": ("model.layers.N.input_layernorm",),
    "layers.N.attention.qkv": tuple(f"model.layers.N.self_attn.{p}_proj" for p in "qkv"),
    "layers.N.attention.out": ("model.layers.N.self_attn.o_proj",),
    "layers.N.mlp_norm": ("model.layers.N.post_attention_layernorm",),
    "layers.N.mlp.up": ("model.layers.N.mlp.gate_proj", "model.layers.N.mlp.up_proj"),
    "layers.N.mlp.down": ("model.layers.N.mlp.down_proj",),
    "final_norm": ("model.norm",),
    "output": ("lm_head",),
}
IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


def read_common(config: dict[str, Any], family: str, architecture: str, head_dim: int | None, **own: Any) -> ModelConfig:
    """From config.json; absent keys have transformers' defaults. `head_dim`: what an absent one means, None: the hidden size
    divided by the heads. `own`: our fields that are the family's."""
    need(config, {"hidden_act": "silu", "quantization_config": None}, architecture)
    vocab, hidden, ffn, layers, heads = required(
        config, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
    )
    width = config.get("head_dim") or head_dim
    usual = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads and hidden % heads == 0 else None
    fields = {
        "family": family,
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": None if width == usual else width,
        "vocab_size": vocab,
        "max_position_embeddings": config.get("max_position_embeddings", 2048),
        "normalization": "rmsnorm",
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "activation": "swiglu",
        "position_embedding": "rope",
        **read_rope(config),
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "attention_dropout": config.get("attention_dropout") or 0.0,
        "init_method_std": config.get("initializer_range", 0.02),
        **own,
    }
    return ModelConfig(**fields)


def write_common(model: ModelConfig) -> dict[str, Any]:
    """To config.json."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        **write_rope(model),
        "attention_dropout": model.attention_dropout,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": model.tie_embeddings,
        "use_cache": True,
    }


def read_layer_windows(config: dict[str, Any], architecture: str) -> int | None:
    """The window of a Qwen model, where use_sliding_window gives the layers from max_window_layers on one. Our decoder's
    layers are alike: Refused where only some have it."""
    if not config.get("use_sliding_window") or config.get("sliding_window", 4096) is None:
        return None
    (layers,), first = required(config, "num_hidden_layers"), config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"}:
        some = kinds.count("sliding_attention")
        raise Refused(
            f"config.json has a sliding window on {some} of {layers} layers (max_window_layers = {first}), megakit's"
            f" {architecture} has it on all layers or none"
        )
    return config.get("sliding_window", 4096)


def write_layer_windows(model: ModelConfig) -> dict[str, Any]:
    """The keys that state it."""
    windowed = model.window_size is not None
    return {
        "use_sliding_window": windowed,
        "sliding_window": model.window_size,
        "max_window_layers": 0 if windowed else model.num_layers,
    }
