"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, section 3.2), with the hysteresis of Megatron-LM's DynamicGradScaler.

The loss is multiplied by a scale before the backward pass, so that small gradients don't vanish in fp16, and the gradients
are divided by it in fp32. When one overflows, the step is skipped, and after `hysteresis` such steps the scale is halved,
at each further one again. After `window` good steps in a row it is doubled, and the hysteresis starts afresh.
"""

from __future__ import annotations

import math

from megakit.config.schema import OptimConfig

LARGEST = 2.0**127
"""The scale is multiplied with an fp32 loss."""


class LossScale:
    """Pure state, moved by what all ranks have agreed on: so it is equal on all of them."""

    def __init__(self, optim: OptimConfig, tokens: int):
        """tokens: of a micro-batch. The scale is, as usual, that of their mean loss; the backward pass differentiates their
        sum, and so starts from `seed`."""
        self.scale = optim.initial_loss_scale
        self._min, self._window, self._hysteresis = optim.min_loss_scale, optim.loss_scale_window, optim.loss_scale_hysteresis
        self._good, self._left = 0, self._hysteresis
        self._unit = 2.0 ** math.ceil(math.log2(tokens))  # a power of two: scaling by it is exact

    @property
    def seed(self) -> float:
        """Gradient of the sum of losses; what the gradients must be divided by."""
        return self.scale / self._unit

    def update(self, skipped: bool) -> None:
        """After each step."""
        if skipped:
            self._good = 0
            self._left -= 1
            if self._left <= 0:
                self.scale = max(self.scale / 2, self._min)
            return
        self._good += 1
        if self._good >= self._window:
            self._good, self._left = 0, self._hysteresis
            self.scale = min(self.scale * 2, max(self.scale, LARGEST))

    def state(self) -> dict[str, float]:
        """For a checkpoint."""
        return {"scale": self.scale, "good_steps": self._good, "hysteresis_left": self._left}

    def load(self, state: dict[str, float]) -> None:
        """The recipe's own limits hold from here on: they may be others than those of the run that was saved."""
        self.scale = max(state["scale"], self._min)
        self._good, self._left = int(state["good_steps"]), min(int(state["hysteresis_left"]), self._hysteresis)
