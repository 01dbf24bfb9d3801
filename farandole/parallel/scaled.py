"""fp16 training: a scaled loss, and steps that overflow are skipped and explained.

An overflow is said by rank 0 in a line of the standard error:

    OVERFLOW step 7: rank 1, blocks.3.mlp.weight grad inf; scale 65536 -> 32768, step skipped
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from farandole.parallel.loss_scaling import LossScaler
from farandole.parallel.nonfinite import NonFinite, OutputWatch

if TYPE_CHECKING:
    from farandole.parallel.engine import Engine


@dataclass(frozen=True)
class Overflow:
    """A step that was skipped: its number, counted from 1, what was wrong, and the scale before and after."""

    step: int
    found: NonFinite
    before: float
    after: float

    def __str__(self) -> str:
        output = f"; {self.found.output}" if self.found.output else ""
        return (
            f"OVERFLOW step {self.step}: {self.found}; scale {_number(self.before)} -> {_number(self.after)}, "
            f"step skipped{output}"
        )


def _number(scale: float) -> str:
    """A scale as people write it: 65536, not 6.5536e+04."""
    return str(int(scale)) if scale == int(scale) and scale < 1e16 else f"{scale:g}"


class ScaledSteps:
    """Scales the loss of `engine` by `scaler`, unscales its gradients, and decides which steps are skipped.

    A scaler that is not enabled leaves everything as it is.  The blocks' outputs are looked at in the step after an
    overflow, to tell whether the forward pass had one too, or in every step with `diagnose`.  With `report` rank 0
    prints a line for every overflow; at the minimum of the scale, for one in 100 of them.
    """

    def __init__(self, engine: Engine, scaler: LossScaler, *, diagnose: bool, report: bool) -> None:
        self.scaler = scaler
        self.overflow: Overflow | None = None
        """Of the last step, if it was skipped."""
        self._engine = engine
        self._diagnose, self._report = diagnose, report
        self._outputs = OutputWatch(engine.model)
        if diagnose:
            self._outputs.arm()
        self.begin_step()
        self._in_backward = False

    # ---- what happens in a step, as the reducer tells it ----

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        self.norm: float | None = None  # of the averaged gradients, once it is known
        self._unscaled = False  # the gradients are those of the loss itself
        self._decided = False  # whether to skip the step

    def begin_pass(self) -> None:
        """Refuse a loss that is not scaled."""
        if self.scaler.enabled and not self._in_backward:
            raise RuntimeError(
                "fp16 needs a scaled loss: call engine.backward(loss) instead of loss.backward()"
            )
        self._decided = False

    def end_step(self) -> None:
        """Unscale the averages."""
        if self.scaler.enabled:
            self._engine.scale_all(1 / self.scaler.scale)
            self._unscaled = True

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()`, scaled."""
        if not self.scaler.enabled:
            loss.backward()
            return
        if self._unscaled:  # this pass adds to gradients that were handed out
            self._engine.scale_all(self.scaler.scale)
            self.norm, self._unscaled = None, False
        self._in_backward = True
        try:
            self.scaler.multiply(loss).backward()
        finally:
            self._in_backward = False

    # ---- the update ----

    @property
    def finite(self) -> bool:
        """Whether nothing is known of an overflow."""
        return not self.scaler.enabled or self.norm is None or math.isfinite(self.norm)

    def decide(self) -> None:
        """Decide whether the step is skipped; once, however many optimizers there are.  All ranks call it."""
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
            self._engine.take_away()  # without gradients an optimizer changes nothing, not even its counts
        if self._diagnose or self.overflow is not None:
            self._outputs.arm()
        else:
            self._outputs.disarm()
        if self._report and self._engine.rank == 0:
            self._say()

    def close(self) -> None:
        """Look at no outputs any more."""
        self._outputs.disarm()

    def _say(self) -> None:
        if self.overflow is not None and self.scaler.worth_saying:
            print(self.overflow, file=sys.stderr)
            if self.scaler.advice:
                print(f"farandole: {self.scaler.advice}", file=sys.stderr, flush=True)
