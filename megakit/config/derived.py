"""Sizes of the model that follow from its keys: the width of a head, and how far attention reaches."""

from __future__ import annotations

from megakit.config.schema import Config, ModelConfig


def head_dim(m: ModelConfig) -> int:
    """Width of an attention head."""
    return m.hidden_size // m.num_attention_heads if m.kv_channels is None else m.kv_channels


def window(cfg: Config) -> int | None:
    """Tokens that a token sees, itself among them, where that is less than the whole sequence before it; else None."""
    size = cfg.model.window_size
    return None if size is None or size >= cfg.train.seq_len else size


def reach(m: ModelConfig, seq_len: int) -> float:
    """Twice the mean number of tokens before a token that it sees: seq_len without a window. With a window of W the pairs are
    a triangle of side W and a band behind it, W seq_len - W^2 / 2, in place of seq_len^2 / 2."""
    w = min(m.window_size or seq_len, seq_len)
    return w * (2 * seq_len - w) / seq_len
