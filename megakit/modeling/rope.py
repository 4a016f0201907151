"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-rotation form of Hugging Face's Llama.

Pair i of a head of width D turns by position x f_i with f_i = base^(-2i/D): its wavelength is 2 pi / f_i positions. A model
that is to read beyond the context it was trained on has its frequencies lowered by a factor s (`model.rope_scaling`):

  linear  f_i / s for every pair ("position interpolation", Chen et al. 2023, arXiv:2306.15595).
  llama3  only the long wavelengths (Llama 3.1's released code; Grattafiori et al. 2024, arXiv:2407.21783): with
          r_i = L f_i / 2 pi turns within the original context L, f_i / s where r_i < low, f_i where r_i > high, and
          between them (1 - t) f_i / s + t f_i with t = (r_i - low) / (high - low).
  yarn    "NTK by parts" (Peng et al. 2023, arXiv:2309.00071, section 3.2): the same idea with a ramp that is linear in i
          between the pairs that make beta_fast and beta_slow turns within L; and cos and sin are multiplied by
          0.1 ln s + 1 (section 3.4: a temperature on the scores). The ends of the ramp are whole pairs, as in the
          authors' code and in transformers.
"""

from __future__ import annotations

import math

import torch

from megakit.config.derived import head_dim
from megakit.config.schema import ModelConfig


def rope_frequencies(m: ModelConfig, device: torch.device) -> tuple[torch.Tensor, float]:
    """fp32 [D/2] radians per position of each pair, and what cos and sin are multiplied by."""
    d, base, kind = head_dim(m), m.rotary_base, m.rope_scaling
    frequency = base ** -(torch.arange(0, d, 2, dtype=torch.float32, device=device) / d)
    if kind == "none":
        return frequency, 1.0
    factor = m.rope_factor or 1.0
    if kind == "linear":
        return frequency / factor, 1.0
    original = m.rope_original_max_position_embeddings or 0
    if kind == "llama3":
        low, high = m.rope_low_freq_factor or 0.0, m.rope_high_freq_factor or 0.0
        turns = original * frequency / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * frequency / factor + kept * frequency, 1.0
    first = math.floor(_pair_with_turns(m.rope_beta_fast, d, base, original))
    last = math.ceil(_pair_with_turns(m.rope_beta_slow, d, base, original))
    first, last = max(first, 0), min(last, d - 1)
    ramp = (torch.arange(d // 2, dtype=torch.float32, device=device) - first) / (last - first or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    attention = m.rope_attention_factor
    return (1 - kept) * frequency / factor + kept * frequency, yarn_attention_factor(factor) if attention is None else attention


def _pair_with_turns(turns: float, d: int, base: float, context: int) -> float:
    """The (fractional) pair that turns that many times within the context: i with context * base^(-2i/d) = 2 pi * turns."""
    return d * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))


def yarn_attention_factor(factor: float) -> float:
    """YaRN's recommendation, eq. 22: sqrt(1/t) = 0.1 ln s + 1."""
    return 0.1 * math.log(factor) + 1.0


def rope_table(m: ModelConfig, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of each of `positions` [S] x frequency, fp32 [S, 1, 1, D/2]."""
    frequency, scale = rope_frequencies(m, positions.device)
    angle = torch.outer(positions.float(), frequency)[:, None, None]
    return angle.cos() * scale, angle.sin() * scale
