"""Plans whose model states fit into a device: what an error offers instead.

The formulas are those of Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", section 3, for what this package keeps: gradients are averaged in fp32, and ranks that share memory have one copy
of the weights with any stage from 1 on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from farandole.data.wording import counted, size
from farandole.memory.purpose import Kind
from farandole.parallel.data import BUCKET_BYTES
from farandole.plan import Plan

_WIDE = 4  # bytes of an fp32 number
_STATES = 2 * _WIDE  # of AdamW: two averages
_FOR_ACTIVATIONS = 0.1


@dataclass(frozen=True)
class Trained:
    """What is trained: a number of `parameters`, of which the largest tensor has `largest`, by `ranks` ranks.

    `common`: whether they share memory.
    """

    parameters: int
    largest: int
    ranks: int
    common: bool


def state_bytes(plan: Plan, trained: Trained) -> dict[Kind, int]:
    """What a rank needs under `plan` with AdamW, in bytes by kind; activations come on top.

    It is that of ranks on a CPU, where what is offloaded to the host stays in the same memory.
    With stages 2 and 3 there are two buffers for gradients on their way, and what is kept on a disk passes through three,
    each for a bucket; the largest bucket is known but for `BUCKET_BYTES`, so that this is a little too much.
    """
    parameters, ranks = trained.parameters, trained.ranks
    narrow = plan.precision != "fp32"
    masters = _WIDE if narrow and plan.rounding != "stochastic" else 0
    sharded = plan.zero == 3 or (plan.zero > 0 and trained.common)
    bucket = min(parameters, trained.largest + BUCKET_BYTES // _WIDE)
    passing = plan.offload_folder is not None
    gradients = parameters // ranks + 2 * bucket if plan.zero >= 2 else parameters
    updated = (3 * bucket if passing else parameters) // (ranks if plan.zero else 1)
    return {
        "weights": (2 if narrow else _WIDE) * parameters // (ranks if sharded else 1),
        "gradients": _WIDE * gradients,
        "masters and states": (masters + _STATES) * updated,
    }


def most_bytes(plan: Plan, trained: Trained) -> int:
    """The most that a rank needs at a time, without activations.

    Masters are made in memory, also where they are offloaded from then on.  With stages 2 and 3 gradients get that memory
    after them; with the others they have theirs already.
    """
    kept = sum(state_bytes(plan, trained).values())
    if plan.offload_folder is None or plan.precision == "fp32" or plan.zero >= 2:
        return kept
    return kept + _WIDE * trained.parameters // (trained.ranks if plan.zero else 1)


def fitting_plans(limit: int, trained: Trained, folder: str) -> Iterator[tuple[Plan, int]]:
    """Plans whose `most_bytes` leave a tenth of `limit` to activations, with these bytes, the simplest first.

    `folder` is what stands in them for a folder on a disk.
    """
    for offload in ("none", f"disk:{folder}"):
        for precision in ("fp32", "bf16"):
            for zero in (0, 1, 3) if trained.common else (0, 1, 2, 3):  # in common memory 2 is the same as 3
                plan = replace(Plan(zero=zero, offload=offload), precision=precision, recompute="block")
                need = most_bytes(plan, trained)
                if need <= (1 - _FOR_ACTIVATIONS) * limit:
                    yield plan, need


def what_fits(limit: int, trained: Trained, folder: str) -> str:
    """For an error: the three simplest of `fitting_plans`, a line for each, or that there is none."""
    found = list(fitting_plans(limit, trained, folder))
    if not found:
        fewest = Plan(zero=3, precision="bf16", offload=f"disk:{folder}")
        least = most_bytes(fewest, trained)
        return f"no plan fits: {counted(trained.ranks, 'rank')} need {size(least)} each at least; more ranks need less"
    lines = [
        f"  --zero {plan.zero} --precision {plan.precision} --recompute {plan.recompute} --offload {plan.offload}: "
        f"{size(need)} of model states for each rank, and activations"
        for plan, need in found[:3]
    ]
    return "\n".join(["what fits:", *lines])
