"""Sharded weights that are gathered only while their block computes (`zero=3`, `gatherer`).

Ranks that share memory do not need to gather (`weights`), unless shards are offloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm.communicator import Communicator
from farandole.memory.disk_file import aligned_buffer
from farandole.memory.offloaded_tensor import OffloadedTensors
from farandole.memory.tracker import memory_tag
from farandole.parallel.zero.hidden_parameters import hide, show
from farandole.parallel.zero.sharding import BucketPlan
from farandole.parallel.zero.weights import FlatWeights, Masters, is_same_memory, nowhere


class GatheredWeights(FlatWeights):
    """A bucket's weights, of which this rank stores a shard.

    While the weights are not gathered, the parameters keep their shapes but use no memory, and raise errors when they
    are read (`hidden_parameters`).

    Args:
        offload: the store for the shard; None if the shard stays in memory.
        master_copy: whether master weights are separate from the shard even if both have the same dtype.
    """

    def __init__(
        self,
        plan: BucketPlan,
        number: int,
        shards: Communicator | None,
        *,
        trained: bool,
        masters: Masters = "memory",
        offload: OffloadedTensors | None = None,
        master_copy: bool = False,
    ) -> None:
        super().__init__(plan, number, shards, trained=trained, masters=masters)
        self.has_master_copy = self.has_master_copy or (trained and master_copy)
        self.is_offloaded = offload is not None
        self._gather_comm = shards
        with torch.no_grad():
            with memory_tag("masters and states" if self.has_master_copy else "weights", self.parameters):
                copy = self._master_shard()
            with memory_tag("weights", self.parameters):
                self.shard = copy if plan.dtype == copy.dtype else copy.to(plan.dtype)
                self._nowhere = nowhere(copy.numel(), plan.dtype, plan.device)
                self._stored = (
                    None if offload is None else offload.make(copy.numel(), plan.dtype, plan.device)
                )
            if self._stored is not None:
                self._stored.write(self.shard)
                self.shard = self._nowhere
            self.master = self._first_master(masters, copy) if trained else None
            nothing = torch.full((), torch.nan, dtype=plan.dtype, device=plan.device)
        self._placeholders = [nothing.expand(parameter.shape) for parameter in self.parameters]
        self._whole: Tensor | None = None
        self._own: Tensor | None = None  # an offloaded shard that is being gathered
        self._work: dist.Work | None = None
        self.is_whole = False
        """Whether the parameters have their values."""
        self._set(self._placeholders)  # hidden when the engine is complete

    def gather_over(self, comm: Communicator | None) -> None:
        """Use `comm`, a separate communicator of the same ranks, for gathers.

        The order of gathers is then independent of other calls.
        """
        self._gather_comm = comm

    def gather_async(self) -> None:
        """Start to gather the weights."""
        if self._gather_comm is None and self._whole is not None:
            return
        with memory_tag("weights", self.parameters):
            own = self.shard if self._stored is None else self._stored.read()
            if self._gather_comm is None:
                self._whole = own
                return
            whole = self._empty_whole()
        work = self._gather_comm.all_gather(whole, own, async_op=True)
        if self._whole is None:
            self._whole, self._own, self._work = whole, own, work
        elif work is not None:  # only other ranks need this group
            work.wait()

    def _empty_whole(self) -> Tensor:
        if self._stored is None or self.plan.device.type != "cpu":
            return torch.empty(self._layout.length, dtype=self.plan.dtype, device=self.plan.device)
        nbytes = self._layout.length * self.plan.dtype.itemsize
        # huge pages, which are returned to the kernel as soon as they are freed
        return aligned_buffer(nbytes)[:nbytes].view(self.plan.dtype)

    def use(self) -> Tensor:
        """Point the parameters to views of the gathered buffer, and return the buffer."""
        assert self._whole is not None
        if not self.is_whole:
            self._wait_for_work()
            self._show()
            self.check_in_place()
            self._set(self._layout.views(self._whole))
            self.is_whole = True
        return self._whole

    def hide(self) -> None:
        """Hide the parameters until the next `use`; the weights remain gathered."""
        if self.is_whole:
            self.is_whole = False
            self._hide()

    @property
    def is_gathered(self) -> bool:
        """Whether the weights are gathered or being gathered."""
        return self._whole is not None

    def release(self) -> None:
        """Release the gathered weights, and keep this rank's shard."""
        self._wait_for_work()
        if self._stored is not None:
            self._stored.drop()
        if self._whole is not None:
            self.use_weights()

    def _wait_for_work(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._work = self._own = None

    # ---- offloaded shards ----

    def prefetch(self) -> None:
        """Start reading an offloaded shard, unless the weights are gathered."""
        if self._stored is not None and self._whole is None:
            with memory_tag("weights", self.parameters):
                self._stored.prefetch()

    @contextmanager
    def in_memory(
        self, *, write: bool = False, blank: bool = False, device: torch.device | None = None
    ) -> Iterator[None]:
        """Return a context manager that temporarily loads the shard into memory; see `FlatWeights.in_memory`."""
        if self._stored is None or self.shard is not self._nowhere:
            yield
            return
        with memory_tag("weights", self.parameters):
            self.shard = self._stored.empty(device) if blank else self._stored.read(device)
        try:
            yield
            if write:
                self._stored.write(self.shard)
        finally:
            self.shard = self._nowhere

    def has(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is in the gathered memory."""
        whole = self._whole
        return whole is not None and whole.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()

    def use_weights(self) -> None:
        """Release the gathered memory, and point the parameters to placeholders."""
        self._whole, self.is_whole = None, False
        self._hide()

    def _hide(self) -> None:
        self._show()
        self._set(self._placeholders)
        for name, parameter in zip(self.plan.names, self.parameters, strict=True):
            hide(parameter, name)

    def _show(self) -> None:
        for parameter in self.parameters:
            show(parameter)

    def use_masters(self) -> None:
        """Point the parameters to unsharded copies of the master weights.  This is a collective call."""
        self.release()
        with self.in_memory():
            master = self.master if self.has_master_copy else None
            self._show()
            self._set(self._gathered(self.shard if master is None else master))

    def is_in_place(self, index: int) -> bool:
        """Return whether parameter `index` is a placeholder or gathered."""
        return self.is_whole or is_same_memory(self.parameters[index], self._placeholders[index])

    def set_values(self, index: int, values: Tensor) -> None:
        """Set the weights and master weights of parameter `index`.

        All ranks must call this method with the same values.
        """
        with self.in_memory(write=True):
            self._set_range(self.shard, index, values)
        if self.has_master_copy and self.master is not None:
            self._set_range(self.master, index, values)

    def all_gather_async(self) -> None:
        """Copy the updated master weights to the shard, and release gathered weights."""
        self.release()
        if self.master is not None and self.has_master_copy:
            with self.in_memory(write=True, blank=True, device=self.master.device):
                self.shard.copy_(self.master)

    def wait(self) -> None:
        """Do nothing: blocks gather the weights when they need them."""
