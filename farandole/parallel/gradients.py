"""The gradients of a bucket: a flat buffer that a backward pass fills, and what is left after its reduction.

`zero` decides what is left to a rank and for how long there is a whole buffer:

    0     the average of everything, in the buffer                     all-reduce
    1     the average of its shard, in its part of the buffer          reduce-scatter
    2, 3  the average of its shard, in memory of its own; the buffer   reduce-scatter, of each backward pass
          is borrowed for the time of a backward pass, or is what
          autograd has made for the only parameter

Where hosts have a copy each (`hybrid`), what a rank has left is then averaged over those that have the same shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.comm.compression import Compression
from farandole.comm.compression.call import check
from farandole.memory.mmap_allocator import MmapAllocator
from farandole.memory.tracker import memory_tag
from farandole.parallel.flat import FlatLayout
from farandole.parallel.lender import Loan


class Gradients:
    """Takes the gradients of `parameters` in a backward pass and averages them over all ranks.

    They are summed up and reduced in `dtype`.  With a `loan` a whole buffer is borrowed for each pass, or the gradient of a
    single parameter adopted (`lender`).  With a
    `compression` they are compressed between hosts.  `replicas` are the ranks with the same shard as this one.  What
    is left after a pass is kept in `room`, or in memory.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: FlatLayout,
        comm: Communicator,
        dtype: torch.dtype,
        zero: int,
        compression: Compression | None = None,
        loan: Loan | None = None,
        replicas: Communicator | None = None,
        room: MmapAllocator | None = None,
    ) -> None:
        self._mapped = None if room is None or loan is None else room.own(layout.shard_length, dtype)
        self._replicas = replicas
        self._crossed = False  # or on the way between replicas
        self._parameters, self._layout, self._comm = parameters, layout, comm
        self._zero, self._dtype = zero, dtype
        self._loan = loan
        self._whole: Tensor | None = None
        self._views: list[Tensor] = []
        self._shown: list[Tensor] = []
        if loan is None:
            with memory_tag("gradients", parameters):
                whole = comm.empty(layout.length, dtype=dtype, device=parameters[0].device)
                layout.zero_gaps(self._hold(whole))
        self.compressor = None
        if compression is not None:
            check(comm, parameters[0])
            shapes = list(zip(layout.starts, layout.shapes, strict=True))
            self.compressor = compression.for_tensor(layout.length, shapes)
        # whether autograd may go on adding to the buffer itself
        self._keeps = loan is None and dtype == parameters[0].dtype
        self._held = False  # `reduced` holds a part of this step's average
        self._reduced: Tensor | None = None
        self._target: Tensor | None = None
        self._work: dist.Work | None = None
        self.launched = False
        self.received = [False] * len(parameters)

    @property
    def reduced(self) -> Tensor:
        """What the reduction leaves to this rank, of undefined content before the first one of a step.

        Where it is memory of its own, it is taken when it is first asked for, and given back by `clear`: masters on their
        way to where they are kept have the room, and then activations, most of which are gone when there are gradients.
        """
        if self._reduced is None:
            self._reduced = self._room_for_reduced()
        return self._reduced

    @property
    def held(self) -> bool:
        """Whether there is anything in `reduced`, or may be."""
        return self._reduced is not None

    def _room_for_reduced(self) -> Tensor:
        if self._loan is None:
            whole = self._have_whole()
            return self._layout.shard(whole, self._comm.rank) if self._zero else whole
        if self._mapped is not None:
            return self._mapped
        with memory_tag("gradients", self._parameters):
            device = self._parameters[0].device
            return torch.empty(self._layout.shard_length, dtype=self._dtype, device=device)

    def clear(self) -> None:
        """Forget the gradients: the next ones are the first of a new step."""
        self._wait()  # for what a backward pass that failed has left on its way
        self._held = self.launched = False
        if self._loan is not None and self._whole is not None:
            self._give_back(self._loan)
        if self._loan is not None and self._mapped is None:
            self._reduced = None
        self.received = [False] * len(self._parameters)

    def views(self) -> list[Tensor]:
        """The gradients in the buffer, as `.grad` of the parameters."""
        self._reduced = self._have_whole()
        return [self._show(index) for index in range(len(self._views))]

    def _show(self, index: int) -> Tensor:
        """A gradient in the buffer: another tensor than the view that is used here, as Module.to() changes its data."""
        view, shown = self._views[index], self._shown[index]
        if shown.data_ptr() != view.data_ptr() or shown.dtype != view.dtype:
            shown = self._shown[index] = view.detach()
        return shown

    def resume(self) -> None:
        """Have further passes add to the averages, which were handed out."""
        if self._loan is not None:
            return  # each pass is averaged, and then added
        whole = self._have_whole()
        if self._zero and self._comm.size > 1:
            own = self._layout.shard(whole, self._comm.rank)
            kept = own * self._comm.size  # the average of it and the zeros of the other ranks is what it was
            whole.zero_()
            own.copy_(kept)
        self.received = [True] * len(self._parameters)
        self.launched = False

    def receive(self, index: int, gradient: Tensor) -> None:
        """Take over the `gradient` that parameter `index` has just accumulated."""
        parameter = self._parameters[index]
        if self._adopt(gradient):
            parameter.grad = None
            self.received[index] = True
            return
        self._have_whole()
        view = self._views[index]
        if gradient.data_ptr() != view.data_ptr() or not view.numel():  # else it was accumulated in the view
            if self.received[index]:
                view.add_(gradient)
            else:
                view.copy_(gradient)
            parameter.grad = self._show(index) if self._keeps else None
        self.received[index] = True

    def own(self) -> tuple[Tensor, dict[int, Tensor]]:
        """The buffer with what this rank has summed up, and in it the gradients it got, by parameter.

        Elsewhere in the buffer there may be anything, until `launch`.
        """
        whole = self._have_whole()
        return whole, {index: view for index, view in enumerate(self._views) if self.received[index]}

    def launch(self) -> None:
        """Start to average over all ranks; nothing may be touched until `finish`."""
        whole = self._have_whole()
        for view, received in zip(self._views, self.received, strict=True):
            if not received:
                view.zero_()
        own = self._layout.shard(whole, self._comm.rank) if self._zero else whole
        # a further backward pass is averaged where it lies, and then added
        self._target = own if self._held or self._loan is None else self.reduced
        if self._comm.size == 1:
            if self._target is not own:
                self._target.copy_(own)
        elif self._zero:
            self._work = self._comm.reduce_scatter(self._target, whole, "avg", async_op=True)
        else:
            self._work = self._comm.all_reduce(whole, "avg", compression=self.compressor, async_op=True)
        self.launched, self._crossed = True, False

    def advance(self) -> None:
        """Go on to average over replicas, if that is what comes next."""
        if self._replicas is None or not self.launched or self._crossed:
            return
        self._wait()
        assert self._target is not None  # it was launched
        self._work = self._replicas.all_reduce(self._target, "avg", async_op=True)
        self._crossed = True

    def finish(self) -> None:
        """Wait for the reduction.  What was borrowed goes back, ready for a next backward pass."""
        self.advance()
        self._wait()
        if self._loan is None or self._whole is None:
            return
        if self._target is not None and self._target is not self.reduced:
            self.reduced.add_(self._target)
        self._held, self.launched = True, False
        self.received = [False] * len(self._parameters)
        self._give_back(self._loan)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _give_back(self, loan: Loan) -> None:
        self._whole, self._views, self._target = None, [], None
        loan.give_back()

    def _adopt(self, gradient: Tensor) -> bool:
        """Reduce `gradient` from where it lies, if this bucket does so and it is laid out as it has to be."""
        if self._loan is None or not self._loan.adopts or self._whole is not None:
            return False
        if gradient.layout != torch.strided or not gradient.is_contiguous():
            return False
        self._loan.adopt()
        self._hold(gradient.detach().view(-1))
        return True

    def _have_whole(self) -> Tensor:
        if self._whole is not None:
            return self._whole
        assert self._loan is not None  # without one it is there from the beginning
        return self._hold(self._loan.take())

    def _hold(self, whole: Tensor) -> Tensor:
        self._whole, self._views = whole, self._layout.views(whole)
        if self._loan is None:
            self._shown = [view.detach() for view in self._views]
        return whole
