"""The loss scale: what fp16 gradients are multiplied with, so that small ones do not vanish.

fp16 has nothing between 0 and 6e-8 and nothing above 65504.  Gradients of a loss multiplied by a scale lie in the
midst of that; they are divided by it before they are used (Micikevicius et al., 2018, "Mixed Precision Training").
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST = 2.0**16
MINIMUM = 2.0**-14
"""Below it a loss of ordinary size vanishes in fp16 itself."""

_SAID_EVERY = 100
"""Overflows in a row at the minimum, of which one is said."""


class LossScaler:
    """Dynamic loss scaling: the arithmetic of `torch.amp.GradScaler`, with a floor.

    The scale halves when gradients overflow, and that step is skipped; it doubles after `growth_interval` steps in a
    row that did not.  At `minimum` it stays: steps that overflow are skipped there too, and counted by `stuck`.
    Which steps overflowed has to be told to all ranks alike; then their scales are the same.

    With `enabled=False`, for types that need no scale, it stays 1.
    """

    def __init__(
        self,
        scale: float = FIRST,
        growth_interval: int = 1000,
        minimum: float = MINIMUM,
        *,
        enabled: bool = True,
    ) -> None:
        if growth_interval < 1:
            raise ValueError(f"growth_interval={growth_interval}: the scale grows after 1 step or more")
        if not 0 < minimum <= scale:
            raise ValueError(
                f"scale={scale:g} with minimum={minimum:g}: the minimum lies between 0 and the scale"
            )
        self.enabled = enabled
        self.scale = scale if enabled else 1.0
        self.growth_interval, self.minimum = growth_interval, minimum
        self.good_steps = 0
        self.steps = 0
        self.skipped = 0
        self.stuck = 0  # overflows in a row that found the scale at its minimum

    def multiply(self, loss: Tensor) -> Tensor:
        """The loss to call `backward()` on; in fp32 where it was fp16, which has no room for a scaled loss."""
        return loss * torch.tensor(self.scale) if self.enabled else loss

    def update(self, finite: bool) -> None:
        """Count a step, and adapt to whether its gradients were finite."""
        self.steps += 1
        if not self.enabled:
            return
        if finite:
            self.stuck = 0
            self.good_steps += 1
            if self.good_steps >= self.growth_interval:
                self.scale, self.good_steps = self.scale * 2, 0
            return
        self.skipped += 1
        self.stuck = self.stuck + 1 if self.scale <= self.minimum else 0
        self.scale, self.good_steps = max(self.scale / 2, min(self.scale, self.minimum)), 0

    @property
    def worth_saying(self) -> bool:
        """Whether the last overflow should be said: all of them, but few of those at the minimum."""
        return self.stuck <= 1 or self.stuck % _SAID_EVERY == 0

    @property
    def advice(self) -> str:
        """What to do about a scale at its minimum; empty where it is not."""
        if not self.stuck:
            return ""
        row = "1 step has" if self.stuck == 1 else f"{self.stuck} steps in a row have"
        return (
            f"the loss scale stays at its minimum {self.scale:g}, where {row} overflowed and nothing is learned: "
            f"lower the learning rate and go on from a checkpoint, or use bf16 or fp32"
        )

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint has to hold."""
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "steps": self.steps,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from where `state` was saved."""
        self.scale = float(state["scale"])
        self.good_steps, self.steps = int(state["good_steps"]), int(state["steps"])
        self.skipped, self.stuck = int(state["skipped"]), 0
