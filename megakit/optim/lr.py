"""Learning-rate schedules: pure functions of the step.

For step n = 1, 2, ... with warm-up w, peak L, minimum m and end of decay d (the last step of the run by default):

    n < w:               L n / w
    n = w:               L
    cosine, n > w:       m + (L - m) (1 + cos(pi p)) / 2,   p = (n - w) / (d - w)
    linear, n > w:       m + (L - m) (1 - p)
    constant, n > w:     L
    wsd, n <= d - c:     L                                   c = wsd_decay_steps
    wsd, n > d - c:      m + (L - m) f(q),                   q = (n - (d - c)) / c
                         f = 1 - q (linear) | (1 + cos(pi q)) / 2 (cosine) | 1 - sqrt(q) (minus_sqrt)

L and m are `optim.lr` and `optim.min_lr` times the batch-size factor. Both ends hold to the bit: L at step w (and at each
step where nothing has decayed yet), m at step d and after it. minus_sqrt is the 1-sqrt of Hägele et al. 2024.
"""

from __future__ import annotations

import math

from megakit.config.schema import OptimConfig


def learning_rate(optim: OptimConfig, step: int, total_steps: int, factor: float = 1.0) -> float:
    """Learning rate of step `step`, counted from 1, of a run of `total_steps`; `factor` is `batch.lr_factor`."""
    peak, low, warm = optim.lr * factor, optim.min_lr * factor, optim.warmup_steps
    if step < warm:
        return peak * (step / warm)
    end = optim.decay_steps or total_steps
    start = end - (optim.wsd_decay_steps or max(1, end // 10)) if optim.schedule == "wsd" else warm
    if optim.schedule == "constant" or step <= max(start, warm):
        return peak
    if step >= end:
        return low
    left = _left(optim.wsd_decay_style if optim.schedule == "wsd" else optim.schedule, (step - start) / (end - start))
    return min(peak, low + (peak - low) * left)  # rounding must not lift it above the peak


def _left(shape: str, progress: float) -> float:
    """What is left of peak - minimum."""
    if shape == "cosine":
        return (1.0 + math.cos(math.pi * progress)) / 2
    return 1.0 - (math.sqrt(progress) if shape == "minus_sqrt" else progress)
