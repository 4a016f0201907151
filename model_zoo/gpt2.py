"""GPT-2: learned positions, LayerNorm, GELU, biases, every head with its own keys; tied unless said otherwise."""

from __future__ import annotations

from typing import Any

from megakit.config.schema import ModelConfig
from megakit.errors import Refused
from model_zoo.family import Family, need, required

ARCHITECTURE = "GPT2LMHeadModel"
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def read_config(config: dict[str, Any]) -> ModelConfig:
    """From config.json; absent keys have transformers' defaults."""
    only = {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "quantization_config": None,
    }
    need(config, only, ARCHITECTURE)
    vocab, positions, hidden, layers, heads = required(config, "vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
    activation = config.get("activation_function", "gelu_new")
    if activation not in _ACTIVATIONS:
        raise Refused(
            f"config.json has activation_function = {activation}, megakit's {ARCHITECTURE} has {', '.join(_ACTIVATIONS)}"
        )
    return ModelConfig(
        family="gpt2",
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=config.get("n_inner") or 4 * hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        vocab_size=vocab,
        max_position_embeddings=positions,
        normalization="layernorm",
        norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
        activation=_ACTIVATIONS[activation],
        position_embedding="learned",
        add_bias_linear=True,
        tie_embeddings=config.get("tie_word_embeddings", True),
        hidden_dropout=config.get("resid_pdrop", 0.1),
        attention_dropout=config.get("attn_pdrop", 0.1),
        init_method_std=config.get("initializer_range", 0.02),
    )


def write_config(model: ModelConfig) -> dict[str, Any]:
    """To config.json."""
    return {
        "vocab_size": model.vocab_size,
        "n_positions": model.max_position_embeddings,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_hidden_size,
        "activation_function": "gelu" if model.activation == "gelu" else "gelu_new",
        "layer_norm_epsilon": model.norm_epsilon,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": model.tie_embeddings,
        "use_cache": True,
    }


GPT2 = Family(
    name="gpt2",
    architecture=ARCHITECTURE,
    prefix="transformer.",
    modules={
        "embedding.word": ("transformer.wte",),
        "embedding.position": ("transformer.wpe",),
        "layers.N.attention_norm": ("transformer.h.N.ln_1",),
        "layers.N.attention.qkv": ("transformer.h.N.attn.c_attn",),
        "layers.N.attention.out": ("transformer.h.N.attn.c_proj",),
        "layers.N.mlp_norm": ("transformer.h.N.ln_2",),
        "layers.N.mlp.up": ("transformer.h.N.mlp.c_fc",),
        "layers.N.mlp.down": ("transformer.h.N.mlp.c_proj",),
        "final_norm": ("transformer.ln_f",),
        "output": ("lm_head",),
    },
    transposed=frozenset(f"layers.N.{m}" for m in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")),
    ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    read_config=read_config,
    write_config=write_config,
)
