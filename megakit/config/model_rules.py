"""Rules of the model's own keys."""

from __future__ import annotations

from dataclasses import fields

from megakit.config.cures import Broken, Change, broken_alone, divisors, listed, near, nearest_first
from megakit.config.derived import head_dim
from megakit.config.keys import changes_nothing
from megakit.config.schema import Config, ModelConfig
from megakit.errors import Refused


def check(cfg: Config) -> None:
    """Raise Broken or Refused for heads, widths or rotary positions that don't fit one another."""
    _check_heads(cfg.model)
    _check_rope(cfg.model)


def _check_heads(m: ModelConfig) -> None:
    pairs = 2 if m.position_embedding == "rope" else 1
    if m.hidden_size % m.num_attention_heads and m.kv_channels is None:
        raise Broken(
            f"model.hidden_size = {m.hidden_size} is not divisible by model.num_attention_heads = {m.num_attention_heads}",
            *_widths(m, pairs),
            _heads(m, pairs),
            [{"model.kv_channels": round(m.hidden_size / m.num_attention_heads / 2) * 2 or 2}],
        )
    if m.num_attention_heads % m.num_query_groups:
        valid = divisors(m.num_attention_heads)
        raise Broken(
            f"model.num_attention_heads = {m.num_attention_heads} is not divisible by model.num_query_groups ="
            f" {m.num_query_groups}; valid groups {listed(valid)}",
            [{"model.num_query_groups": n} for n in nearest_first(valid, m.num_query_groups)],
        )
    if m.add_qkv_bias and m.add_bias_linear:
        raise broken_alone("model.add_qkv_bias", True, "model.add_bias_linear = true", False, [{"model.add_bias_linear": False}])
    width = head_dim(m)
    if m.position_embedding == "rope" and width % 2 and m.kv_channels is not None:
        even: list[list[Change]] = [[{"model.kv_channels": width + d}] for d in (-1, 1) if width + d]
        raise Broken(f"model.kv_channels = {width} is odd, and rope turns pairs", *even)
    if m.position_embedding == "rope" and width % 2:
        raise Broken(
            f"model.hidden_size / model.num_attention_heads = {m.hidden_size} / {m.num_attention_heads} = {width} is odd, and"
            " rope turns pairs",
            _heads(m, pairs),
            *_widths(m, pairs),
        )


def _heads(m: ModelConfig, pairs: int) -> list[Change]:
    wide = [n for n in divisors(m.hidden_size) if m.hidden_size // n % pairs == 0]
    return [{"model.num_attention_heads": n} for n in nearest_first(wide, m.num_attention_heads)]


def _widths(m: ModelConfig, pairs: int) -> list[list[Change]]:
    return [[change] for change in near("model.hidden_size", m.hidden_size, pairs * m.num_attention_heads)]


ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("rope_factor",),
    "llama3": ("rope_factor", "rope_original_max_position_embeddings", "rope_low_freq_factor", "rope_high_freq_factor"),
    "yarn": ("rope_factor", "rope_original_max_position_embeddings"),
}
"""What each kind of RoPE scaling can't do without."""
ROPE_TAKES = {**ROPE_NEEDS, "yarn": (*ROPE_NEEDS["yarn"], "rope_beta_fast", "rope_beta_slow", "rope_attention_factor")}
"""All that each kind reads."""


def _check_rope(m: ModelConfig) -> None:
    kind = m.rope_scaling
    if m.position_embedding != "rope" and m.rotary_base != ModelConfig.rotary_base:
        beside = f"model.position_embedding = {m.position_embedding}"
        raise changes_nothing("model.rotary_base", m.rotary_base, beside, "model.position_embedding=rope")
    if kind != "none" and m.position_embedding != "rope":
        raise Refused(
            f"model.rope_scaling = {kind} changes nothing with model.position_embedding = {m.position_embedding}: set it to"
            " none, or use model.position_embedding=rope"
        )
    for f in fields(m):
        if not f.name.startswith("rope_") or f.name == "rope_scaling":
            continue
        value = getattr(m, f.name)
        if f.name not in ROPE_TAKES[kind] and value != f.default:
            takers = " or ".join(k for k, names in ROPE_TAKES.items() if f.name in names)
            raise changes_nothing(f"model.{f.name}", value, f"model.rope_scaling = {kind}", f"model.rope_scaling={takers}")
        if f.name in ROPE_NEEDS[kind] and value is None:
            raise Refused(
                f"model.rope_scaling = {kind} needs model.{f.name}, which is null: give it, or use model.rope_scaling=none"
            )
    low, high = {
        "llama3": ("rope_low_freq_factor", "rope_high_freq_factor"),
        "yarn": ("rope_beta_slow", "rope_beta_fast"),
    }.get(kind, ("", ""))
    if low and getattr(m, low) >= getattr(m, high):
        raise Refused(
            f"model.{low} = {getattr(m, low)} is not below model.{high} = {getattr(m, high)}: between them lie the pairs that"
            " are scaled in part"
        )
    original = m.rope_original_max_position_embeddings
    if original is not None and original > m.max_position_embeddings:
        raise Refused(
            f"model.rope_original_max_position_embeddings = {original} is longer than the context after scaling,"
            f" model.max_position_embeddings = {m.max_position_embeddings}: correct one"
        )
