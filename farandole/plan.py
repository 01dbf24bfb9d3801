"""A plan: how the ranks of a job share the training of a model.

    Plan(data=4, zero=2, precision="bf16")

A plan is chosen for speed or memory; what is learned stays that of one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Precision = Literal["fp32", "bf16", "fp16"]
Rounding = Literal["nearest", "stochastic"]


class PlanError(ValueError):
    """A plan that cannot be; the message says what was asked and what would do."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is asked for; `check` says whether some number of ranks can do it.

    data: over how many ranks samples are divided; None for all there are.
    zero: what these ranks divide instead of each having all of it (Rajbhandari et al., 2020): 1 the states of the
        optimizer, 2 gradients too, 3 weights too.
    precision: the type of the weights that the model computes with.  The optimizer keeps masters in the type that
        the model was made in, and gradients are averaged in that type.
    rounding: how what the optimizer computes becomes bf16 weights.  With "stochastic" there are no masters, which saves
        4 bytes per parameter (`parallel.rounding`).
    """

    data: int | None = None
    zero: int = 0
    precision: Precision = "fp32"
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        if self.data is not None and self.data < 1:
            raise PlanError(f"data={self.data}: an axis has 1 rank or more")
        if self.zero not in (0, 1, 2, 3):
            raise PlanError(f"zero={self.zero}: the stages are 0, 1, 2 and 3")
        if self.precision not in get_args(Precision):
            raise PlanError(f"precision={self.precision!r}: one of {', '.join(get_args(Precision))}")
        if self.rounding not in get_args(Rounding):
            raise PlanError(f"rounding={self.rounding!r}: one of {', '.join(get_args(Rounding))}")
        if self.rounding == "stochastic" and self.precision != "bf16":
            raise PlanError(
                f"rounding='stochastic' with precision={self.precision!r}: it is for bf16; nearest plan: "
                f"precision='bf16'"
            )

    def check(self, ranks: int) -> None:
        """Raise `PlanError` unless the plan is one for `ranks` ranks."""
        if self.data is not None and self.data != ranks:
            raise PlanError(
                f"the plan needs data={self.data} ranks, {ranks} were launched; nearest plan: data={ranks}"
            )
