"""A bucket's weights: the weights with which the model computes, and the master weights that the optimizer updates.

Each rank's optimizer updates the rank's shard in the master weights' dtype.  If the model computes in the same dtype,
the master weights share memory with the model's weights.

    WholeWeights       every rank has all weights in one flat buffer; ranks with shared memory share the buffer
    GatheredWeights    each rank has its shard, in memory or offloaded; blocks gather their weights (`gathered_weights`)

Ranks that share a buffer read all of it, and each updates its own shard in place, without gathering.  Two barriers
separate reads and writes (`Engine`): no rank updates its shard before all ranks have finished their backward passes,
and no rank reads the buffer before all ranks have updated their shards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.memory.tracker import memory_tag
from farandole.parallel.zero.sharding import BucketPlan

Masters = Literal["memory", "offloaded", "none"]
"""Where master weights are: in memory, in an offload store, or only within an update (`optimizers.rounding`)."""


EDIT = "make changes within `with engine.edit_parameters():`, or load them with model.load_state_dict()"


class FlatWeights(ABC):
    """The weights of the parameters in `plan`, in a flat buffer that consists of shards.

    Args:
        number: the index of this rank's shard.
        shards: the communicator of the ranks among which the buffer is sharded; None if the buffer is not sharded.
        trained: whether the parameters are trained and therefore have master weights.
    """

    shard: Tensor
    """This rank's shard of the model's weights; an offloaded shard reads as NaN outside of `in_memory`."""
    master: Tensor | None
    """This rank's shard of the master weights; None for frozen parameters and offloaded master weights."""
    is_offloaded = False
    """Whether the shard is offloaded between uses."""
    shared = False
    """Whether the ranks that shard the weights share one buffer."""

    def __init__(
        self,
        plan: BucketPlan,
        number: int,
        shards: Communicator | None,
        *,
        trained: bool,
        masters: Masters = "memory",
    ) -> None:
        self.plan, self.number, self.trained = plan, number, trained
        self.parameters = list(plan.parameters)
        self.comm, self._layout = shards, plan.layout
        elsewhere = masters == "offloaded" and is_accelerator(plan.device)
        self.has_master_copy = (
            trained and masters != "none" and (plan.dtype != plan.master_dtype or elsewhere)
        )
        """Whether master weights are separate tensors."""

    @abstractmethod
    def use_weights(self) -> None:
        """Point the parameters to the weights with which the model computes."""

    @abstractmethod
    def use_masters(self) -> None:
        """Point the parameters to unsharded copies of the master weights.  This is a collective call."""

    @abstractmethod
    def is_in_place(self, index: int) -> bool:
        """Return whether parameter `index` still uses the memory that the engine assigned to it."""

    def check_in_place(self) -> None:
        """Raise RuntimeError if a parameter was moved out of the engine's memory."""
        for index, name in enumerate(self.plan.names):
            if not self.is_in_place(index):
                raise RuntimeError(
                    f"{name} was moved out of the memory that the engine updates: call model.to(), .half() "
                    f"and similar methods before parallelize, and do not assign to .data; {EDIT}"
                )

    @abstractmethod
    def set_values(self, index: int, values: Tensor) -> None:
        """Set the weights and master weights of parameter `index`.

        All ranks must call this method with the same values.
        """

    @abstractmethod
    def all_gather_async(self) -> None:
        """Start distributing the updated master weights to all ranks."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for `all_gather_async`."""

    @contextmanager
    def in_memory(
        self, *, write: bool = False, blank: bool = False, device: torch.device | None = None
    ) -> Iterator[None]:
        """Return a context manager within which the values of `shard` are in memory, even if it is offloaded.

        Changes to an offloaded shard are kept only if `write` is True.  With `blank`, an offloaded shard is not read,
        because the caller will write all of its values.  If possible, an offloaded shard is read into memory on
        `device`.
        """
        yield

    @abstractmethod
    def prefetch(self) -> None:
        """Start reading an offloaded shard."""

    def ranges(self) -> Iterator[tuple[nn.Parameter, slice, int]]:
        """Yield (parameter, slice of the shard, offset in the parameter) for each parameter in the shard."""
        for part in self._layout.ranges(self.number):
            yield self.parameters[part.index], slice(part.offset, part.offset + part.length), part.start

    def _set(self, tensors: list[Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor

    def _gathered(self, shard: Tensor) -> list[Tensor]:
        """Gather the shards of all ranks, and return unsharded tensors."""
        whole = shard.new_empty(self._layout.length)
        if self.comm is None:
            whole.copy_(shard)
        else:
            self.comm.all_gather(whole, shard)
        return self._layout.views(whole)

    def _master_shard(self) -> Tensor:
        """Return a copy of this rank's shard of the parameters, in the master weights' dtype."""
        shard = torch.zeros(self._layout.shard_length, dtype=self.plan.master_dtype, device=self.plan.device)
        for part in self._layout.ranges(self.number):
            if is_placeholder(self.parameters[part.index]):
                continue
            values = self.parameters[part.index].detach().reshape(-1)
            shard[part.offset : part.offset + part.length] = values[part.start : part.start + part.length]
        return shard

    def _first_master(self, masters: Masters, copy: Tensor) -> Tensor:
        """Return the initial master weights, given a `copy` of the shard."""
        if masters == "none":
            return nowhere(copy.numel(), copy.dtype, copy.device)
        if masters == "offloaded" and is_accelerator(copy.device):
            return copy.to("cpu", copy=True)
        return copy if self.has_master_copy else self.shard

    def _set_range(self, shard: Tensor, index: int, values: Tensor) -> None:
        """Copy this rank's part of parameter `index` from `values` to `shard`."""
        for part in self._layout.ranges(self.number):
            if part.index == index:
                own = values.reshape(-1)[part.start : part.start + part.length]
                shard[part.offset : part.offset + part.length].copy_(own)


class WholeWeights(FlatWeights):
    """Unsharded weights in one flat buffer, either on every rank or shared by all ranks on the host."""

    def __init__(
        self,
        plan: BucketPlan,
        number: int,
        shards: Communicator | None,
        *,
        trained: bool,
        masters: Masters = "memory",
    ) -> None:
        super().__init__(plan, number, shards, trained=trained, masters=masters)
        self.shared = shards is not None and shards.shares_memory(plan.device)
        self._work: dist.Work | None = None
        with memory_tag("weights", self.parameters, ranks=shards.size if shards and self.shared else 1):
            self._buffer = self._allocate()
        self.shard = self._layout.shard(self._buffer, number)
        self.master = None
        with torch.no_grad():
            if trained:
                with memory_tag("masters and states", self.parameters):
                    apart = self.has_master_copy or masters == "none"
                    self.master = self._first_master(masters, self._master_shard()) if apart else self.shard
            self._views = self._layout.views(self._buffer)
            if shards is None or not self.shared or shards.rank == 0:
                for parameter, view in zip(self.parameters, self._views, strict=True):
                    if not is_placeholder(parameter):
                        view.copy_(parameter)
            self.use_weights()
        if shards is not None and self.shared:
            shards.barrier()

    def _allocate(self) -> Tensor:
        """Return a new buffer of zeros, without touching its memory pages."""
        length, dtype = self._layout.length, self.plan.dtype
        if self.comm is not None and self.shared:
            buffer = self.comm.shared(length, dtype=dtype, device=self.plan.device)
            assert buffer is not None
            return buffer
        return torch.zeros(length, dtype=dtype, device=self.plan.device)

    def use_weights(self) -> None:
        """Point the parameters to views of the buffer."""
        self._set(self._views)

    def use_masters(self) -> None:
        """Point the parameters to unsharded copies of the master weights.  This is a collective call."""
        if self.has_master_copy and self.master is not None:
            self._set(self._gathered(self.master))
        else:
            self._set(self._layout.views(self._buffer.clone()))

    def is_in_place(self, index: int) -> bool:
        """Return whether parameter `index` is in the buffer."""
        return is_same_memory(self.parameters[index], self._views[index])

    def set_values(self, index: int, values: Tensor) -> None:
        """Set the weights and master weights of parameter `index`.

        All ranks must call this method with the same values.
        """
        if self.comm is None or not self.shared or self.comm.rank == 0:
            self._views[index].copy_(values)
        if self.has_master_copy and self.master is not None:
            self._set_range(self.master, index, values)

    def prefetch(self) -> None:
        """Do nothing: the weights are in memory."""

    def all_gather_async(self) -> None:
        """Start distributing the updated shards to all ranks."""
        if self.master is not None and self.has_master_copy:
            self.shard.copy_(self.master)
        if self.comm is not None and not self.shared:
            self._work = self.comm.all_gather(self._buffer, self.shard, async_op=True)

    def wait(self) -> None:
        """Wait for `all_gather_async`."""
        if self._work is not None:
            self._work.wait()
            self._work = None


def is_placeholder(tensor: Tensor) -> bool:
    """Return whether a tensor has a shape but no memory, as created by `initial_values.stand_in`."""
    return tensor.numel() > 1 and not any(tensor.stride())


def nowhere(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a flat tensor that reads as NaN and takes no memory."""
    return torch.full((1,), torch.nan, dtype=dtype, device=device).expand(numel)


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device has memory separate from the host's."""
    return device.type != "cpu"


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of the same shape are views of the same memory."""
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.device == b.device
