"""Unsharded parameters for optimizers that compute with matrices, such as Muon, Adafactor and LAMB.

With `zero` >= 1, each rank stores a shard of each bucket, and a shard may end within a matrix.  One of the ranks that
store parts of a matrix is its owner.  The owner updates the complete matrix and stores its optimizer states:

    owned.receive()     # owners receive the gradients and master weights of their matrices
    optimizer.step()    # updates complete matrices
    owned.send_back()   # every rank receives its parts of the updated master weights

A parameter that lies within one shard is updated in place and not sent.  Between steps, an owned parameter reads as NaN
and uses no memory.  During a step, the owner needs memory for the parameter's gradient and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.memory.tracker import memory_tag
from farandole.parallel.optimizers.shards import OptimizerShards
from farandole.parallel.zero.sharding import FlatRange

_COPIES = 2
"""The number of tensors that are sent for each part: gradient and values."""


@dataclass(frozen=True)
class _Part:
    """A range of a parameter: rank `holder` stores the range, and rank `owner` updates the whole parameter."""

    holder: int
    owner: int
    range: FlatRange


class OwnedParameters:
    """The parameters that this rank updates as complete tensors with one optimizer.

    Args:
        shards: this rank's shards of each bucket.
        members: the `id` of each parameter that the optimizer updates.  All ranks must pass the same parameters.
    """

    def __init__(self, shards: Sequence[OptimizerShards], members: set[int]) -> None:
        self._shards = [each for each in shards if any(id(p) in members for p in each.parameters)]
        self._within: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._exchanges: list[_Exchange] = []
        loads: dict[tuple[int, ...], list[int]] = {}
        for each in self._shards:
            plan = each.bucket.plan
            load = loads.setdefault(plan.ranks.shards, [0] * plan.layout.shards)
            parts = _owned_parts(each, members, load)
            sent = {part.range.index for part in parts}
            self._within += [
                (parameter, tensor)
                for index, (parameter, tensor) in enumerate(zip(each.parameters, each.tensors, strict=True))
                if tensor is not None and id(parameter) in members and index not in sent
            ]
            if parts:
                comm = each.bucket.shards
                assert comm is not None  # a divided parameter has several holders
                self._exchanges.append(_Exchange(each, comm, parts))

    def tensors(self) -> Iterator[tuple[nn.Parameter, nn.Parameter, int]]:
        """Yield (parameter, complete tensor, start index 0) for each parameter that this rank updates."""
        for parameter, tensor in self._within:
            yield parameter, tensor, 0
        for exchange in self._exchanges:
            yield from exchange.owned()

    @torch.no_grad()
    def receive(self) -> None:
        """Receive the gradients and values of the owned parameters.  This is a collective call."""
        for exchange in self._exchanges:
            exchange.receive()

    @torch.no_grad()
    def send_back(self) -> None:
        """Send every rank its parts of the new values, and free the owned parameters.  This is a collective call."""
        for exchange in self._exchanges:
            exchange.send_back()


class _Exchange:
    """Sends parameters that span several shards of a bucket to their owners and back."""

    def __init__(self, shards: OptimizerShards, comm: Communicator, parts: Sequence[_Part]) -> None:
        self._shards, self._comm = shards, comm
        self._held = sorted((p for p in parts if p.holder == comm.rank), key=lambda part: part.owner)
        self._wanted = sorted((p for p in parts if p.owner == comm.rank), key=lambda part: part.holder)
        self._to_owners = [_length(p for p in self._held if p.owner == rank) for rank in range(comm.size)]
        self._from_holders = [
            _length(p for p in self._wanted if p.holder == rank) for rank in range(comm.size)
        ]
        self._plan = shards.bucket.plan
        self._whole = {
            part.range.index: nn.Parameter(self._placeholder(part.range.index)) for part in self._wanted
        }
        self._received = False

    def owned(self) -> Iterator[tuple[nn.Parameter, nn.Parameter, int]]:
        for index, whole in self._whole.items():
            yield self._shards.parameters[index], whole, 0

    def receive(self) -> None:
        sent = self._empty(_COPIES * sum(self._to_owners))
        at = 0
        for part in self._held:
            tensor, length = self._tensor(part), part.range.length
            sent[at + length : at + 2 * length].copy_(tensor.detach().view(-1))
            gradient = tensor.grad
            if gradient is None:
                sent[at : at + length].zero_()
            else:
                sent[at : at + length].copy_(gradient.view(-1))
            at += 2 * length
        received = self._empty(_COPIES * sum(self._from_holders))
        splits = [[_COPIES * n for n in lengths] for lengths in (self._from_holders, self._to_owners)]
        self._comm.all_to_all(received, sent, *splits)
        del sent
        gradients: dict[int, Tensor] = {}
        for index, whole in self._whole.items():
            shape = self._plan.layout.shapes[index]
            with memory_tag("masters and states"):
                whole.data, gradients[index] = received.new_empty(shape), received.new_empty(shape)
        at = 0
        for part in self._wanted:
            index, length = part.range.index, part.range.length
            place = slice(part.range.start, part.range.start + length)
            gradients[index].view(-1)[place] = received[at : at + length]
            self._whole[index].data.view(-1)[place] = received[at + length : at + 2 * length]
            at += 2 * length
        for part in self._wanted:
            has_gradient = self._tensor(part).grad is not None  # all ranks have a gradient, or none has
            if part.holder == part.owner and has_gradient:
                self._whole[part.range.index].grad = gradients[part.range.index]
        self._received = True

    def send_back(self) -> None:
        if not self._received:
            return
        self._received = False
        parts = [
            self._whole[part.range.index]
            .detach()
            .view(-1)[part.range.start : part.range.start + part.range.length]
            for part in self._wanted
        ]
        sent = torch.cat(parts) if parts else self._empty(0)
        for index, whole in self._whole.items():
            whole.data, whole.grad = self._placeholder(index), None
        received = self._empty(sum(self._to_owners))
        self._comm.all_to_all(received, sent, self._to_owners, self._from_holders)
        for part, values in zip(
            self._held, received.split([p.range.length for p in self._held]), strict=True
        ):
            self._tensor(part).detach().view(-1).copy_(values)

    def _tensor(self, part: _Part) -> nn.Parameter:
        tensor = self._shards.tensors[part.range.index]
        assert tensor is not None  # this rank stores the part
        return tensor

    def _empty(self, length: int) -> Tensor:
        return torch.empty(length, dtype=self._plan.master_dtype, device=self._plan.device)

    def _placeholder(self, index: int) -> Tensor:
        nothing = torch.full((), torch.nan, dtype=self._plan.master_dtype, device=self._plan.device)
        return nothing.expand(self._plan.layout.shapes[index])


def _owned_parts(shards: OptimizerShards, members: set[int], load: list[int]) -> list[_Part]:
    """Return the parts of the parameters that span several shards, with an owner for each parameter."""
    # `load[rank]`, the number of elements that `rank` updates, is increased by the parameters in `members`
    layout = shards.bucket.plan.layout
    holders: dict[int, list[tuple[int, FlatRange]]] = {}
    for rank in range(layout.shards):
        for found in layout.ranges(rank):
            if id(shards.parameters[found.index]) in members:
                holders.setdefault(found.index, []).append((rank, found))
    for index, held in holders.items():
        if len(held) == 1:
            load[held[0][0]] += layout.counts[index]
    parts: list[_Part] = []
    for index, held in sorted(holders.items(), key=lambda item: -layout.counts[item[0]]):
        if len(held) > 1:
            owner = min((rank for rank, _ in held), key=lambda rank: load[rank])
            load[owner] += layout.counts[index]
            parts += [_Part(rank, owner, found) for rank, found in held]
    return parts


def _length(parts: Iterator[_Part]) -> int:
    return sum(part.range.length for part in parts)
