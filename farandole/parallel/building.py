"""A model's parameters made into buckets, as a stage of ZeRO wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from farandole.comm.communicator import Communicator
from farandole.comm.compression import Compression
from farandole.memory.blocks import blocks_of
from farandole.memory.mmap_allocator import MmapAllocator
from farandole.parallel.buckets import Bucket, Filling, fill, filling_of
from farandole.parallel.flat import FlatLayout
from farandole.parallel.gathering import GatheredWeights, Gathering
from farandole.parallel.gradients import Gradients
from farandole.parallel.lender import Lender, Loan
from farandole.parallel.weights import Masters, Weights


@dataclass
class Built:
    """What a model was made into: its trained parameters in buckets, those first whose gradients come first.

    `weights` are those of all parameters that lie in flat buffers, frozen ones too.  `gathering` is there where they are
    sharded among ranks that do not share memory.
    """

    buckets: list[Bucket] = field(default_factory=list)
    weights: list[Weights | GatheredWeights] = field(default_factory=list)
    gathering: Gathering | None = None


@dataclass(frozen=True)
class Rooms:
    """Where what takes most memory is made, if not there."""

    gradients: MmapAllocator | None = None
    weights: MmapAllocator | None = None


class Builder:
    """Makes the parameters of `model` what stage `zero` wants them to be.

    With `zero`, a `dtype` or pieces that are to be offloaded the parameters become views of flat buffers, frozen ones
    too.  Ranks of `comm` divide them; `replicas` have the same shard as this one.  `masters` says where those of trained
    ones are, `rooms` where weights and gradients are made.  `settle` completes the reduction of a bucket whose memory
    another one wants (`Lender`).
    """

    def __init__(
        self,
        comm: Communicator,
        bucket_bytes: int,
        compression: Compression | None,
        zero: int,
        dtype: torch.dtype | None,
        settle: Callable[[int], bool],
        *,
        masters: Masters = "beside",
        replicas: Communicator | None = None,
        rooms: Rooms | None = None,
    ) -> None:
        self._rooms = rooms or Rooms()
        self._replicas = replicas
        self._moves = zero > 0 or dtype is not None or masters == "offloaded"
        self._masters: Masters = masters
        self._comm, self._bucket_bytes = comm, bucket_bytes
        self._compression, self._zero, self._dtype = compression, zero, dtype
        self._settle = settle
        self._kept: set[int] = set()  # the parameters that keep their type
        self._shards = comm.size if zero else 1
        self._own = comm.rank if zero else 0

    def build(self, model: nn.Module) -> Built:
        """Do it; called by all ranks."""
        parameters = list(model.parameters())
        self._kept = {id(p) for p in _of_statistics(model)} if self._dtype is not None else set()
        gathers = (
            self._zero == 3
            and self._comm.size > 1
            and not all(self._comm.shares_memory(p.device) for p in parameters)
        )
        if gathers:
            return self._build_gathered(model)
        frozen: list[Weights] = []
        if self._moves:
            filled = fill(filter(_is_frozen, parameters), self._bucket_bytes, self._kept)
            frozen = [self._whole_weights(members, trained=False) for members in filled]
        trained = [parameter for parameter in reversed(parameters) if parameter.requires_grad]
        filled = fill(trained, self._bucket_bytes, self._kept)
        weights = [self._whole_weights(members, trained=True) if self._moves else None for members in filled]
        moved = [weight for weight in weights if weight is not None]
        return Built(self._buckets(filled, weights), [*frozen, *moved])

    def _build_gathered(self, model: nn.Module) -> Built:
        """Weights are gathered block by block, so that no bucket has parameters of two."""
        blocks = blocks_of(model)
        homes: dict[int, list[int]] = {}  # of a parameter: the blocks that have it
        for number, (_, block) in enumerate(blocks):
            for parameter in block.parameters():
                homes.setdefault(id(parameter), []).append(number)
        rest = len(blocks)  # the group of what no block has for itself
        group_of = {key: found[0] if len(found) == 1 else rest for key, found in homes.items()}
        members: list[list[nn.Parameter]] = [[] for _ in range(rest + 1)]
        for parameter in model.parameters():
            members[group_of.get(id(parameter), rest)].append(parameter)
        groups: list[list[GatheredWeights]] = [[] for _ in members]
        filled: list[list[nn.Parameter]] = []
        weights: list[Weights | GatheredWeights | None] = []
        for number in reversed(range(len(members))):
            for frozen in fill(filter(_is_frozen, members[number]), _NO_LIMIT, self._kept):
                groups[number].append(self._gathered_weights(frozen, trained=False))
            own = (p for p in reversed(members[number]) if p.requires_grad)
            for trained in fill(own, _NO_LIMIT, self._kept):
                groups[number].append(self._gathered_weights(trained, trained=True))
                filled.append(trained)
                weights.append(groups[number][-1])
        needs = [
            (block, sorted({group_of[id(parameter)] for parameter in block.parameters()}))
            for _, block in blocks
        ]
        if any(id(parameter) not in homes for parameter in model.parameters()):
            needs.append((model, [rest]))
        return Built(
            self._buckets(filled, weights),
            [weight for group in groups for weight in group],
            Gathering(groups, needs),
        )

    def _buckets(
        self, filled: Sequence[list[nn.Parameter]], weights: Sequence[Weights | GatheredWeights | None]
    ) -> list[Bucket]:
        layouts = [
            self._layout(members) if weight is not None else self._layout_in_place(members)
            for members, weight in zip(filled, weights, strict=True)
        ]
        # the type of the optimizer and of what is reduced: that of the masters
        types = [
            members[0].dtype if weight is None or weight.master is None else weight.master.dtype
            for members, weight in zip(filled, weights, strict=True)
        ]
        loans: list[Loan | None] = [None] * len(filled)
        if self._zero >= 2:
            loans = self._loans(filled, layouts, types)
        buckets = []
        for members, layout, weight, dtype, loan in zip(filled, layouts, weights, types, loans, strict=True):
            gradients = Gradients(
                members,
                layout,
                self._comm,
                dtype,
                self._zero,
                self._compression,
                loan,
                self._replicas,
                self._rooms.gradients,
            )
            buckets.append(
                Bucket(members, layout, self._own, weight, gradients, offloaded=self._masters == "offloaded")
            )
        return buckets

    def _type_of(self, members: Sequence[nn.Parameter]) -> torch.dtype:
        """The type that the model computes with."""
        return members[0].dtype if self._dtype is None or id(members[0]) in self._kept else self._dtype

    def _layout(self, members: Sequence[nn.Parameter]) -> FlatLayout:
        return FlatLayout([p.shape for p in members], self._shards)

    def _layout_in_place(self, members: Sequence[nn.Parameter]) -> FlatLayout:
        """Of gradients of parameters that stay where they are, as channels_last ones may: fused optimizers want both alike."""
        strides = [torch.empty_like(p, device="meta").stride() for p in members]  # without gaps
        return FlatLayout([p.shape for p in members], strides=strides)

    def _whole_weights(self, members: Sequence[nn.Parameter], *, trained: bool) -> Weights:
        kind = self._type_of(members)
        layout = self._layout(members)
        return Weights(
            members,
            layout,
            self._own,
            self._comm,
            kind,
            sharded=self._zero > 0,
            trained=trained,
            masters=self._masters,
            room=self._rooms.weights,
        )

    def _gathered_weights(self, members: Sequence[nn.Parameter], *, trained: bool) -> GatheredWeights:
        kind = self._type_of(members)
        return GatheredWeights(
            members,
            self._layout(members),
            self._own,
            self._comm,
            kind,
            trained=trained,
            masters=self._masters,
            room=self._rooms.weights,
        )

    def _loans(
        self,
        filled: Sequence[Sequence[nn.Parameter]],
        layouts: Sequence[FlatLayout],
        types: Sequence[torch.dtype],
    ) -> list[Loan | None]:
        """What each bucket may borrow for its gradients; a lender for each type, device and way to fill one."""
        of_kind: dict[tuple[torch.dtype, torch.device, Filling], list[int]] = {}
        for number, (members, layout, dtype) in enumerate(zip(filled, layouts, types, strict=True)):
            filling = filling_of(layout, same_type=members[0].dtype == dtype)
            of_kind.setdefault((dtype, members[0].device, filling), []).append(number)
        loans: list[Loan | None] = [None] * len(filled)
        for (dtype, device, filling), numbers in of_kind.items():
            lengths = [layouts[number].length for number in numbers]
            settle = partial(_settle_place, self._settle, numbers)
            lender = Lender(self._comm, lengths, dtype, device, settle, adopts=filling == "adopts")
            for number, loan in zip(numbers, lender.loans(), strict=True):
                loans[number] = loan
        return loans


_NO_LIMIT = 1 << 62


def _of_statistics(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of layers such as BatchNorm, which compute with statistics in fp32, and take such parameters only."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            yield from module.parameters(recurse=False)


def _is_frozen(parameter: nn.Parameter) -> bool:
    """Whether it is not trained, and an ordinary tensor of numbers: not one of integers or a quantized one."""
    plain = parameter.is_floating_point() and type(parameter.data) is torch.Tensor
    return not parameter.requires_grad and plain


def _settle_place(settle: Callable[[int], bool], numbers: Sequence[int], place: int) -> bool:
    return settle(numbers[place])
