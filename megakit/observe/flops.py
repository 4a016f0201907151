"""Useful FLOPs per token, and MFU. No torch here.

Per token, forward and backward: 6 * N' + 12 * L * a * s, with N' the parameters without the input embedding (word and
position tables, which are looked up) but with the output head, also a tied one; L layers, a = heads * head width, s the
sequence length. The second term is attention's two products over the full s x s square; a causal kernel skips half of it,
and `causal=True` counts that: 6 * L * a * s. With a sliding window of W < s the pairs are those of the window, W (2 s - W) / s
in place of s in both. metrics.jsonl's mfu uses the full square, the convention of most published
figures. Recomputation is never counted: it is not useful work.
"""

from __future__ import annotations

from megakit.config.derived import head_dim, reach
from megakit.config.schema import Config, ModelConfig
from megakit.modeling.layout import parameter_count


def flops_per_token(model: ModelConfig, seq_len: int, causal: bool = False) -> int:
    """FLOPs of one token of training in a sequence of `seq_len`, the whole model on all ranks."""
    tables = model.vocab_size * (0 if model.tie_embeddings else 1)  # a tied one works as the head
    if model.position_embedding == "learned":
        tables += model.max_position_embeddings
    multiplied = parameter_count(Config(model=model)) - tables * model.hidden_size
    attention = (6 if causal else 12) * model.num_layers * model.num_attention_heads * head_dim(model)
    return 6 * multiplied + round(attention * reach(model, seq_len))


def mfu(tokens_per_s_per_gpu: float, flops_per_token: int, peak_tflops: float | None) -> float | None:
    """Share of the device's peak rate that is useful work, 0 to 1; None where the peak is not known."""
    return None if peak_tflops is None else tokens_per_s_per_gpu * flops_per_token / (peak_tflops * 1e12)
