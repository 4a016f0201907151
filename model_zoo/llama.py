"""Llama: rotary positions, RMSNorm, SwiGLU, grouped queries, no biases."""

from __future__ import annotations

import math
from typing import Any

from megakit.config.derived import head_dim
from megakit.config.schema import ModelConfig
from megakit.errors import Refused
from model_zoo.family import Family, need, required

ARCHITECTURE = "LlamaForCausalLM"


_ROPE_KEYS = {
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        "original_max_position_embeddings": "rope_original_max_position_embeddings",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
    },
    "yarn": {
        "factor": "rope_factor",
        "original_max_position_embeddings": "rope_original_max_position_embeddings",
        "beta_fast": "rope_beta_fast",
        "beta_slow": "rope_beta_slow",
        "attention_factor": "rope_attention_factor",
    },
}
"""Hugging Face's parameters of each kind of scaling, and our fields."""
_ROPE_OPTIONAL = {"beta_fast", "beta_slow", "attention_factor"}


def _rope_blocks(config: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """`rope_parameters` (transformers 5) and `rope_scaling` (4, and older spellings), where they are given."""
    return [(name, config[name]) for name in ("rope_parameters", "rope_scaling") if config.get(name) is not None]


def _rotary_base(config: dict[str, Any]) -> float:
    """RoPE theta from `rope_parameters` (transformers 5) or the top level."""
    bases = {float(config["rope_theta"])} if config.get("rope_theta") is not None else set()
    bases |= {float(rope["rope_theta"]) for _, rope in _rope_blocks(config) if rope.get("rope_theta") is not None}
    if len(bases) > 1:
        raise Refused(f"config.json gives rope_theta twice, as {' and '.join(str(b) for b in sorted(bases))}: correct one")
    return bases.pop() if bases else 10000.0


def _rope_scaling(config: dict[str, Any]) -> dict[str, Any]:
    """Our rope_ fields. What our rotary embedding doesn't do is refused, for it would change the logits."""
    found = {name: fields for name, rope in _rope_blocks(config) if (fields := _scaling_of(name, rope, config))}
    if len(found) == 2 and found["rope_parameters"] != found["rope_scaling"]:
        raise Refused("config.json gives rope_parameters and rope_scaling, which differ: correct one")
    return next(iter(found.values()), {})


def _scaling_of(block: str, rope: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        raise Refused(f"config.json has {block}.partial_rotary_factor = {partial}, megakit turns whole heads only")
    if kind == "default":
        return {}
    if kind not in _ROPE_KEYS:
        raise Refused(
            f"config.json has {block} of type {kind}, megakit's rotary embedding has default, {', '.join(_ROPE_KEYS)}: another"
            " scaling would change the logits"
        )
    keys = _ROPE_KEYS[kind]
    known = {*keys, "rope_type", "type", "rope_theta", "partial_rotary_factor"}
    values = {k: v for k, v in rope.items() if v is not None and k not in known}
    mscales = (values.pop("mscale", None), values.pop("mscale_all_dim", None)) if kind == "yarn" else (None, None)
    if values.pop("truncate", True) is not True or values:
        name, value = next(((k, rope[k]) for k in values), ("truncate", rope.get("truncate")))
        raise Refused(f"config.json has {block}.{name} = {value}, which megakit's {kind} scaling doesn't have")
    values = {"original_max_position_embeddings": config.get("original_max_position_embeddings"), **rope}
    if "original_max_position_embeddings" in keys and values["original_max_position_embeddings"] is None:
        values["original_max_position_embeddings"] = config.get("max_position_embeddings", 2048)  # as transformers fills it in
    for name in keys:
        value = values.get(name)
        if (value is None and name not in _ROPE_OPTIONAL) or isinstance(value, (str, bool)):
            raise Refused(f"config.json has {block} of type {kind} with {name} = {value}, which is no number")
    if kind == "yarn":
        values["attention_factor"] = _attention_factor(values["factor"], values.get("attention_factor"), *mscales)
    out = {ours: values[name] for name, ours in keys.items() if values.get(name) is not None}
    if out["rope_factor"] == 1 and "rope_attention_factor" not in out:
        return {}  # scales nothing
    return {"rope_scaling": kind, **out}


def _attention_factor(factor: float, given: float | None, mscale: float | None, mscale_all_dim: float | None) -> float | None:
    """yarn's factor on cos and sin; None where it is the recommended one (transformers.modeling_rope_utils)."""
    recommended = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    if given is None and mscale and mscale_all_dim:
        log = math.log(factor) if factor > 1 else 0.0
        given = (0.1 * mscale * log + 1.0) / (0.1 * mscale_all_dim * log + 1.0)
    return None if given is None or math.isclose(given, recommended, rel_tol=1e-9) else given


def _rope_json(model: ModelConfig) -> dict[str, Any]:
    """The block that states our rope_ fields, without theta."""
    if model.rope_scaling == "none":
        return {"rope_type": "default"}
    given = {theirs: getattr(model, ours) for theirs, ours in _ROPE_KEYS[model.rope_scaling].items()}
    return {"rope_type": model.rope_scaling, **{k: v for k, v in given.items() if v is not None}}


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
        **_rope_scaling(config),
        add_bias_linear=False,
        tie_embeddings=config.get("tie_word_embeddings", False),
        attention_dropout=config.get("attention_dropout") or 0.0,
        init_method_std=config.get("initializer_range", 0.02),
    )


def write_config(model: ModelConfig) -> dict[str, Any]:
    """To config.json. The rotary base and its scaling stand in both places that versions of transformers read."""
    rope = _rope_json(model)
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
        "rope_scaling": None if model.rope_scaling == "none" else rope,
        "rope_parameters": {**rope, "rope_theta": model.rotary_base},
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
