"""A plan: how the ranks of a job share the training of a model.

    Plan(data=4, zero=2, precision="bf16", recompute="block")

A plan is chosen for speed or memory; what is learned stays that of one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Precision = Literal["fp32", "bf16", "fp16"]
Recompute = Literal["none", "block", "selective", "attention", "auto"]


class PlanError(ValueError):
    """A plan that cannot be; the message says what was asked and what would do."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is asked for; `check` says whether some number of ranks can do it.

    data: over how many ranks samples are divided; None for all there are.
    zero: what these ranks divide instead of each having all of it (Rajbhandari et al., 2020): 1 the states of the
        optimizer, 2 gradients too, 3 weights too.
    hybrid: divide among the ranks of a host, and keep a copy on each host.
    precision: the type of the weights that the model computes with.  The optimizer keeps masters in the type that
        the model was made in, and gradients are averaged in that type.
    recompute: which activations are computed again in the backward pass instead of being kept (`memory.recompute`);
        "auto" chooses blocks until at most `activation_bytes` are kept.
    offload: where masters and states of the optimizer live: "none" (with the model), "host", or "disk:FOLDER".
    """

    data: int | None = None
    zero: int = 0
    hybrid: bool = False
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    activation_bytes: int | None = None
    offload: str = "none"

    def __post_init__(self) -> None:
        if self.data is not None and self.data < 1:
            raise PlanError(f"data={self.data}: an axis has 1 rank or more")
        if self.zero not in (0, 1, 2, 3):
            raise PlanError(f"zero={self.zero}: the stages are 0, 1, 2 and 3")
        if self.precision not in get_args(Precision):
            raise PlanError(f"precision={self.precision!r}: one of {', '.join(get_args(Precision))}")
        if self.recompute not in get_args(Recompute):
            raise PlanError(f"recompute={self.recompute!r}: one of {', '.join(get_args(Recompute))}")
        if (self.recompute == "auto") != (self.activation_bytes is not None):
            raise PlanError(
                "recompute='auto' and activation_bytes= go together: neither means anything alone"
            )
        if self.offload not in ("none", "host") and not self.offload.startswith("disk:"):
            raise PlanError(f"offload={self.offload!r}: none, host or disk:FOLDER")
        if self.offload == "disk:":
            raise PlanError("offload='disk:' names no folder; write offload='disk:FOLDER'")

    def check(self, ranks: int) -> None:
        """Raise `PlanError` unless the plan is one for `ranks` ranks."""
        if self.data is not None and self.data != ranks:
            raise PlanError(
                f"the plan needs data={self.data} ranks, {ranks} were launched; nearest plan: data={ranks}"
            )
