"""Llama: rotary positions, RMSNorm, SwiGLU, grouped queries, no biases."""

from __future__ import annotations

from typing import Any

from megakit.config.schema import ModelConfig
from megakit.errors import Refused
from megakit.modeling.layout import head_dim
from model_zoo.family import Family, need, required

ARCHITECTURE = "LlamaForCausalLM"


def _rotary_base(config: dict[str, Any]) -> float:
    """RoPE theta from `rope_parameters` (transformers 5) or the top level; any scaling is refused."""
    bases = {float(config["rope_theta"])} if config.get("rope_theta") is not None else set()
    for block in ("rope_parameters", "rope_scaling"):
        rope = config.get(block)
        if rope is None:
            continue
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise Refused(
                f"config.json has {block} of type {kind}, megakit's rotary embedding has no scaling: it would change the logits"
            )
        if rope.get("partial_rotary_factor") not in (None, 1.0):
            raise Refused(
                f"config.json has {block}.partial_rotary_factor = {rope['partial_rotary_factor']}, megakit turns whole heads only"
            )
        if rope.get("rope_theta") is not None:
            bases.add(float(rope["rope_theta"]))
    if len(bases) > 1:
        raise Refused(f"config.json gives rope_theta twice, as {' and '.join(str(b) for b in sorted(bases))}: correct one")
    return bases.pop() if bases else 10000.0


def read_config(config: dict[str, Any]) -> ModelConfig:
    """From config.json; absent keys have transformers' defaults."""
    only = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "quantization_config": None}
    need(config, only, ARCHITECTURE)
    vocab, hidden, ffn, layers, heads = required(
        config, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
    )
    need(config, {"head_dim": hidden // heads}, ARCHITECTURE)
    return ModelConfig(
        family="llama",
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        vocab_size=vocab,
        max_position_embeddings=config.get("max_position_embeddings", 2048),
        normalization="rmsnorm",
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        activation="swiglu",
        position_embedding="rope",
        rotary_base=_rotary_base(config),
        add_bias_linear=False,
        tie_embeddings=config.get("tie_word_embeddings", False),
        attention_dropout=config.get("attention_dropout") or 0.0,
        init_method_std=config.get("initializer_range", 0.02),
    )


def write_config(model: ModelConfig) -> dict[str, Any]:
    """To config.json. The rotary base stands in both places that versions of transformers read."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": head_dim(model),
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": model.attention_dropout,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": model.tie_embeddings,
        "use_cache": True,
    }


LLAMA = Family(
    name="llama",
    architecture=ARCHITECTURE,
    prefix="model.",
    modules={
        "embedding.word": ("model.embed_tokens",),
        "layers.N.attention_norm": ("model.layers.N.input_layernorm",),
        "layers.N.attention.qkv": tuple(f"model.layers.N.self_attn.{p}_proj" for p in "qkv"),
        "layers.N.attention.out": ("model.layers.N.self_attn.o_proj",),
        "layers.N.mlp_norm": ("model.layers.N.post_attention_layernorm",),
        "layers.N.mlp.up": ("model.layers.N.mlp.gate_proj", "model.layers.N.mlp.up_proj"),
        "layers.N.mlp.down": ("model.layers.N.mlp.down_proj",),
        "final_norm": ("model.norm",),
        "output": ("lm_head",),
    },
    transposed=frozenset(),
    ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
    read_config=read_config,
    write_config=write_config,
)
