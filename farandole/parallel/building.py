"""A model's parameters made into buckets, as a stage of ZeRO wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from farandole.comm.communicator import Communicator
from farandole.comm.compression import Compression
from farandole.parallel.buckets import Bucket, fill
from farandole.parallel.flat import FlatLayout
from farandole.parallel.gradients import Gradients
from farandole.parallel.lender import Lender, Loan
from farandole.parallel.weights import Weights


def build_buckets(
    model: nn.Module,
    comm: Communicator,
    bucket_bytes: int,
    compression: Compression | None,
    zero: int,
    dtype: torch.dtype | None,
    settle: Callable[[int], bool],
) -> list[Bucket]:
    """Buckets of the trained parameters of `model`, those first whose gradients come first.

    With `zero` or a `dtype` the parameters become views of flat buffers, frozen ones too.  `settle` completes the
    reduction of a bucket whose memory another one wants (`Lender`).
    """
    parameters = list(model.parameters())
    moved = zero > 0 or dtype is not None
    if moved:
        frozen = [p for p in parameters if not p.requires_grad and _can_move(p)]
        for members in fill(frozen, bucket_bytes):
            _weights(members, _layout(members, comm, zero), comm, zero, dtype, trained=False)
    trained = [p for p in reversed(parameters) if p.requires_grad]
    filled = fill(trained, bucket_bytes)
    layouts = [_layout(members, comm, zero) for members in filled]
    loans = _loans(filled, layouts, comm, settle) if zero >= 2 else [None] * len(filled)
    buckets = []
    for members, layout, loan in zip(filled, layouts, loans, strict=True):
        kind = members[0].dtype  # of the optimizer, and of what is reduced; weights may get another one
        weights = _weights(members, layout, comm, zero, dtype, trained=True) if moved else None
        gradients = Gradients(members, layout, comm, kind, zero, compression, loan)
        buckets.append(Bucket(members, layout, comm.rank if zero else 0, weights, gradients))
    return buckets


def _layout(members: Sequence[nn.Parameter], comm: Communicator, zero: int) -> FlatLayout:
    return FlatLayout([p.shape for p in members], shards=comm.size if zero else 1)


def _weights(
    members: Sequence[nn.Parameter],
    layout: FlatLayout,
    comm: Communicator,
    zero: int,
    dtype: torch.dtype | None,
    *,
    trained: bool,
) -> Weights:
    own = comm.rank if zero else 0
    kind = dtype or members[0].dtype
    return Weights(members, layout, own, comm, kind, sharded=zero > 0, trained=trained)


def _can_move(parameter: nn.Parameter) -> bool:
    """Whether it is an ordinary tensor of numbers, not one of integers or a quantized one."""
    return parameter.is_floating_point() and type(parameter.data) is torch.Tensor


def _loans(
    filled: Sequence[Sequence[nn.Parameter]],
    layouts: Sequence[FlatLayout],
    comm: Communicator,
    settle: Callable[[int], bool],
) -> list[Loan | None]:
    """What each bucket may borrow for its gradients; there is one lender for each type and device."""
    of_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, members in enumerate(filled):
        of_kind.setdefault((members[0].dtype, members[0].device), []).append(number)
    loans: list[Loan | None] = [None] * len(filled)
    for (dtype, device), numbers in of_kind.items():
        lengths = [layouts[number].length for number in numbers]
        lender = Lender(comm, lengths, dtype, device, partial(_settle_place, settle, numbers))
        for number, loan in zip(numbers, lender.loans(), strict=True):
            loans[number] = loan
    return loans


def _settle_place(settle: Callable[[int], bool], numbers: Sequence[int], place: int) -> bool:
    return settle(numbers[place])
