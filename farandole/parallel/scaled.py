"""Data parallelism with a scaled loss, as fp16 needs: steps whose gradients overflow are skipped, and explained.

    engine = ScaledDataParallel(model, comm, zero=2, dtype=torch.float16)
    optimizer = engine.optimizer(torch.optim.AdamW(model.parameters()))
    engine.backward(loss_of(engine(inputs)))    # scaled; when it returns, gradients are averages, and unscaled
    engine.clip(1.0)
    optimizer.step()                            # leaves everything as it was if a gradient was inf or NaN
    if engine.skipped: ...

An overflow is said by rank 0 in a line of the standard error:

    OVERFLOW step 7: rank 1, blocks.3.mlp.weight grad inf; scale 65536 -> 32768, step skipped
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.parallel.data import DataParallel
from farandole.parallel.loss_scaling import LossScaler
from farandole.parallel.nonfinite import NonFinite, OutputWatch


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


class ScaledDataParallel(DataParallel):
    """`DataParallel` whose loss is scaled by `scaler`; by default one that begins at 65536.

    `overflow` tells of the last step, if it was skipped.  The blocks' outputs are looked at in the step after an
    overflow, to tell whether the forward pass had one too, or in every step with `diagnose`.  With `report` rank 0
    prints a line for every overflow; at the minimum of the scale, for one in 100 of them.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        *settings: Any,
        scaler: LossScaler | None = None,
        diagnose: bool = False,
        report: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(model, comm, *settings, watch=True, **options)
        self.scaler = scaler or LossScaler()
        self.overflow: Overflow | None = None
        self._diagnose, self._report = diagnose, report
        self._output_watch = OutputWatch(model)
        if diagnose:
            self._output_watch.arm()
        self._norm: float | None = None  # of the averaged gradients, once it is known
        self._unscaled = False
        self._in_backward = False
        self._decided = False  # whether these gradients are finite

    @property
    def skipped(self) -> bool:
        """Whether the optimizer's last step was skipped."""
        return self.overflow is not None

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()`, scaled.  Gradients that it leaves in `.grad` after a step's last pass are unscaled."""
        if self._unscaled:  # a further pass adds to gradients that were handed out, if nobody has taken them
            super().scale_gradients(self.scaler.scale)
            self._norm, self._unscaled = None, False
        self._in_backward = True
        try:
            self.scaler.multiply(loss).backward()
        finally:
            self._in_backward = False

    def gradient_norm(self) -> float:
        """The global norm of the averaged gradients; infinite or NaN if the step is going to be skipped."""
        self._norm = super().gradient_norm()
        return self._norm

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient by `factor`, unless they are going to be thrown away."""
        if self._norm is None or math.isfinite(self._norm):
            super().scale_gradients(factor)

    def close(self) -> None:
        """Let go of the model: remove the hooks and the gradients."""
        self._output_watch.disarm()
        super().close()

    def _begin_step(self) -> None:
        super()._begin_step()
        self._norm, self._unscaled = None, False
        self._decided = False

    def _begin_pass(self) -> None:
        if not self._in_backward:
            raise RuntimeError(
                "fp16 needs a scaled loss: call engine.backward(loss) instead of loss.backward()"
            )
        super()._begin_pass()
        self._decided = False

    def _end_pass(self, *, last: bool) -> None:
        super()._end_pass(last=last)
        if last:
            super().scale_gradients(1 / self.scaler.scale)
            self._unscaled = True

    def _before_update(self) -> None:
        super()._before_update()
        if self._decided:  # another optimizer has made its step with these gradients
            return
        self._decided = True
        norm = self.gradient_norm() if self._norm is None else self._norm
        finite, before = math.isfinite(norm), self.scaler.scale
        self.scaler.update(finite)
        if self.scaler.scale != before:
            self.rescale(self.scaler.scale / before)
        self.overflow = None
        if not finite:
            found = self.locate_nonfinite(self._output_watch)
            self.overflow = Overflow(self.scaler.steps, found, before, self.scaler.scale)
            for bucket in self.buckets:  # without gradients an optimizer changes nothing, not even its counts
                bucket.take_away()
        self._watch_outputs()
        if self._report and self._comm.rank == 0:
            self._say()

    def _after_update(self) -> None:
        if not self.skipped:
            super()._after_update()

    def _watch_outputs(self) -> None:
        """Have the next step's outputs looked at if there is a reason to."""
        if self._diagnose or self.skipped:
            self._output_watch.arm()
        else:
            self._output_watch.disarm()

    def _say(self) -> None:
        if self.overflow is not None and self.scaler.worth_saying:
            print(self.overflow, file=sys.stderr)
            if self.scaler.advice:
                print(f"farandole: {self.scaler.advice}", file=sys.stderr, flush=True)
