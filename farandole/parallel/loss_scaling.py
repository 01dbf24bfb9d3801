"""Loss scaling for fp16, which skips and reports steps that overflow.

fp16 overflows above 65504 and underflows below about 6e-8.  The loss is multiplied by a scale that brings gradients
into this range, and gradients are divided by the scale before use (Micikevicius et al., 2018, "Mixed Precision
Training").

Rank 0 logs a warning for an overflow:

    OVERFLOW step 7: rank 1, blocks.3.mlp.weight grad inf; scale 65536 -> 32768, step skipped
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from farandole._troubleshooting import see
from farandole.comm.notices import warn
from farandole.parallel.overflow import GradientWatch, OutputWatch, OverflowReport

if TYPE_CHECKING:
    from farandole.parallel.engine import Engine

FIRST = 2.0**16
MINIMUM = 2.0**-14
"""The minimum scale: with a smaller scale, typical losses underflow in fp16."""

_REPORT_EVERY = 100
"""While the scale is at its minimum, only one in this many consecutive overflows is reported."""


class LossScaler:
    """Dynamic loss scaling as in `torch.amp.GradScaler`, with a minimum scale.

    A step that overflows is skipped and halves the scale.  After `growth_interval` consecutive steps without
    overflow, the scale is doubled.  The scale is never reduced below `minimum`, and `stuck` counts the consecutive
    overflows at `minimum`.  All ranks must pass the same argument to `update`, so that their scales are equal.

    With `enabled=False`, which is intended for dtypes that need no scaling, the scale is always 1.

    Raises:
        ValueError: if `growth_interval` is less than 1, or `minimum` is not between 0 and `scale`.
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
            raise ValueError(f"expected growth_interval of at least 1 step, got {growth_interval}")
        if not 0 < minimum <= scale:
            raise ValueError(f"scale={scale:g} with minimum={minimum:g}: expected 0 < minimum <= scale")
        self.enabled = enabled
        self.scale = scale if enabled else 1.0
        self.growth_interval, self.minimum = growth_interval, minimum
        self.good_steps = 0
        self.steps = 0
        self.skipped = 0
        self.stuck = 0  # consecutive overflows at the minimum

    def multiply(self, loss: Tensor) -> Tensor:
        """Return the scaled loss; an fp16 loss is converted to fp32 to avoid overflow."""
        return loss * torch.tensor(self.scale) if self.enabled else loss

    def update(self, finite: bool) -> None:
        """Count a step and adapt the scale.

        Args:
            finite: whether all gradients of the step are finite.
        """
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
    def is_reported(self) -> bool:
        """Return whether to report the last overflow.  At the minimum scale, only some overflows are reported."""
        return self.stuck <= 1 or self.stuck % _REPORT_EVERY == 0

    @property
    def advice(self) -> str:
        """Return advice if the scale is at its minimum and steps still overflow; otherwise return ""."""
        if not self.stuck:
            return ""
        row = "1 step has" if self.stuck == 1 else f"{self.stuck} steps in a row have"
        return (
            f"the loss scale is at its minimum {self.scale:g}, but {row} overflowed, so the model does not learn: "
            f"lower the learning rate and resume from a checkpoint, or use bf16 or fp32{see('the-loss-is-nan')}"
        )

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "steps": self.steps,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a state that `state_dict` returned."""
        self.scale = float(state["scale"])
        self.good_steps, self.steps = int(state["good_steps"]), int(state["steps"])
        self.skipped, self.stuck = int(state["skipped"]), 0


@dataclass(frozen=True)
class Overflow:
    """A step that was skipped because of an overflow.

    Args:
        step: the index of the step, starting at 1.
        found: the report about the overflow.
        before: the scale before the step.
        after: the scale after the step.
    """

    step: int
    found: OverflowReport
    before: float
    after: float

    def __str__(self) -> str:
        output = f"; {self.found.output}" if self.found.output else ""
        return (
            f"OVERFLOW step {self.step}: {self.found}; scale {_number(self.before)} -> {_number(self.after)}, "
            f"step skipped{output}"
        )


def _number(scale: float) -> str:
    """Format a scale as a number without an exponent: 65536, not 6.5536e+04."""
    return str(int(scale)) if scale == int(scale) and scale < 1e16 else f"{scale:g}"


class ScaledSteps:
    """Scales the engine's loss with `scaler`, unscales the gradients, and decides which steps to skip.

    A disabled scaler changes nothing.

    Args:
        diagnose: check the outputs of blocks in every step, instead of only in the step after an overflow.
        report: log a warning on rank 0 for every overflow, or for one in 100 while the scale is at its minimum.
    """

    def __init__(
        self, engine: Engine, scaler: LossScaler, watch: GradientWatch | None, *, diagnose: bool, report: bool
    ) -> None:
        self.scaler = scaler
        self.watch = watch
        self.overflow: Overflow | None = None
        """The overflow of the last step, if the step was skipped."""
        self._engine = engine
        self._diagnose, self._report = diagnose, report
        self._outputs = OutputWatch(engine.model)
        if diagnose:
            self._outputs.arm()
        self.begin_step()
        self._in_backward = False

    # ---- events of a step, called by the reducer ----

    def begin_step(self) -> None:
        """Discard the state of the previous step."""
        if self.watch is not None:
            self.watch.clear()
        self.norm: float | None = None  # norm of the averaged gradients, once it is known
        self._unscaled = False  # whether gradients are unscaled
        self._decided = False  # whether `decide` has run for this step

    def begin_pass(self) -> None:
        """Begin a backward pass; raise RuntimeError if the loss was not scaled."""
        if self.scaler.enabled and not self._in_backward:
            raise RuntimeError(
                "fp16 needs a scaled loss: call engine.backward(loss) instead of loss.backward()"
            )
        self._decided = False

    def before_reduction(self, number: int) -> None:
        """Check this rank's gradients in bucket `number` for infinities and NaNs, if `self.watch` is set."""
        if self.watch is not None:
            self.watch.check(number)

    def end_step(self) -> None:
        """Divide the averaged gradients by the loss scale."""
        if self.scaler.enabled:
            self._engine.scale_all(1 / self.scaler.scale)
            self._unscaled = True

    def backward(self, loss: Tensor) -> None:
        """Run `loss.backward()` with the scaled loss."""
        with self.scaled():
            self.scaler.multiply(loss).backward()

    @contextmanager
    def scaled(self) -> Iterator[float]:
        """Return a context manager that yields the loss scale.

        The caller multiplies each loss by the scale before its backward pass.
        """
        if self._unscaled:  # this pass adds to gradients that are already unscaled
            self._engine.scale_all(self.scaler.scale)
            self.norm, self._unscaled = None, False
        self._in_backward = True
        try:
            yield self.scaler.scale
        finally:
            self._in_backward = False

    # ---- the update ----

    @property
    def finite(self) -> bool:
        """Return False if an overflow has been detected in this step, and True otherwise."""
        return not self.scaler.enabled or self.norm is None or math.isfinite(self.norm)

    def decide(self) -> None:
        """Decide whether all optimizers skip this step.  This is a collective call.

        Further calls in the same step do nothing.
        """
        if self._decided or not self.scaler.enabled:
            return
        self._decided = True
        norm = self._engine.gradient_norm() if self.norm is None else self.norm
        finite, before = math.isfinite(norm), self.scaler.scale
        self.scaler.update(finite)
        if self.scaler.scale != before:
            self._engine.rescale(self.scaler.scale / before)
        self.overflow = None
        if not finite:
            found = self._engine.locate_nonfinite(self._outputs)
            self.overflow = Overflow(self.scaler.steps, found, before, self.scaler.scale)
            self._engine.clear_gradients()  # without gradients an optimizer changes nothing, not even its counts
        if self._diagnose or self.overflow is not None:
            self._outputs.arm()
        else:
            self._outputs.disarm()
        if self._report and self._engine.rank == 0:
            self._print_report()

    def close(self) -> None:
        """Stop checking outputs."""
        self._outputs.disarm()

    def _print_report(self) -> None:
        if self.overflow is not None and self.scaler.is_reported:
            warn(str(self.overflow))
            if self.scaler.advice:
                warn(self.scaler.advice)
