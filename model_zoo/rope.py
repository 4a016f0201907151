"""Rotary positions in config.json: theta and scaling, in the words of transformers 4 and 5, both ways."""

from __future__ import annotations

import math
from typing import Any

from megakit.config.schema import ModelConfig
from megakit.errors import Refused

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
    places = [config, *(rope for _, rope in _rope_blocks(config))]
    bases = {place["rope_theta"] for place in places if place.get("rope_theta") is not None}
    if len(bases) > 1:
        raise Refused(f"config.json gives rope_theta twice, as {' and '.join(sorted(map(str, bases)))}: correct one")
    base = bases.pop() if bases else 10000.0
    return float(base) if isinstance(base, int) else base  # another type is refused with the other fields


def read_rope(config: dict[str, Any]) -> dict[str, Any]:
    """rotary_base and our rope_ fields, of a config.json. Raises Refused for what our rotary embedding doesn't do, for it
    would change the logits."""
    found = {name: fields for name, rope in _rope_blocks(config) if (fields := _scaling_of(name, rope, config))}
    if len(found) == 2 and found["rope_parameters"] != found["rope_scaling"]:
        raise Refused("config.json gives rope_parameters and rope_scaling, which differ: correct one")
    return {"rotary_base": _rotary_base(config), **next(iter(found.values()), {})}


def _scaling_of(block: str, rope: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        raise Refused(f"config.json has {block}.partial_rotary_factor = {partial}, megakit turns whole heads only")
    if kind not in ["default", *_ROPE_KEYS]:
        raise Refused(
            f"config.json has {block} of type {kind}, megakit's rotary embedding has default, {', '.join(_ROPE_KEYS)}: another"
            " scaling would change the logits"
        )
    if nested := next((name for name, value in rope.items() if isinstance(value, (dict, list))), None):
        raise Refused(
            f"config.json has {block}.{nested} = {rope[nested]}: megakit's layers have one rotary embedding, of numbers"
        )
    if kind == "default":
        return {}
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


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """Keys of config.json that state theta and our rope_ fields, in both places that versions of transformers read."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if model.rope_scaling != "none":
        given = {theirs: getattr(model, ours) for theirs, ours in _ROPE_KEYS[model.rope_scaling].items()}
        rope = {"rope_type": model.rope_scaling, **{k: v for k, v in given.items() if v is not None}}
    return {
        "rope_theta": model.rotary_base,
        "rope_scaling": None if model.rope_scaling == "none" else rope,
        "rope_parameters": {**rope, "rope_theta": model.rotary_base},
    }
