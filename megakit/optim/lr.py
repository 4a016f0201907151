"""Learning-rate schedules: pure functions of the step.

For step n = 1, 2, ... with warm-up w, peak L, minimum m and end of decay d (the last step of the run by default):

    n <= w:              L n / w
    cosine, n > w:       m + (L - m) (1 + cos(pi p)) / 2,   p = min(1, (n - w) / (d - w))
    linear, n > w:       m + (L - m) (1 - p)
    constant, n > w:     L
    wsd, n <= d - c:     L                                   c = wsd_decay_steps
    wsd, n > d - c:      m + (L - m) (1 - q),                q = min(1, (n - (d - c)) / c)

All reach L at the end of the warm-up, and all but constant reach m at step d exactly and stay there.
"""

from __future__ import annotations

import math

from megakit.config.schema import OptimConfig


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of step `step`, counted from 1, of a run of `total_steps`."""
    peak, low, warm = optim.lr, optim.min_lr, optim.warmup_steps
    if step <= warm:
        return peak * step / warm
    if optim.schedule == "constant":
        return peak
    end = optim.decay_steps or total_steps
    if optim.schedule == "wsd":
        length = optim.wsd_decay_steps or max(1, end // 10)
        progress = min(1.0, max(0, step - (end - length)) / length)
    else:
        progress = min(1.0, (step - warm) / (end - warm)) if end > warm else 1.0
    left = (1.0 + math.cos(math.pi * progress)) / 2 if optim.schedule == "cosine" else 1.0 - progress
    return low + (peak - low) * left
