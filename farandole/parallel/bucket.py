"""Gradient buckets: each bucket is a flat buffer with the gradients of several parameters.

Ranks reduce a bucket with one collective:

    bucket.accumulate(index, gradient)    # for each parameter, in a backward pass
    bucket.reduce_async()                 # when all gradients are complete
    bucket.wait()
    bucket.reduced                        # the result on this rank

The ZeRO stage (`zero`) determines the result on a rank, the unsharded buffer and the collective:

    zero  result on a rank         unsharded buffer                       collective
    0     the full result          persistent, contains the result        all-reduce
    1     a shard                  persistent, contains the shard         reduce-scatter
    2, 3  a shard, in separate     from a pool, or autograd's gradient    reduce-scatter, in each backward pass
          memory

With hybrid sharding, each shard is then all-reduced over the ranks that have the same shard.

With offloading, a shard is written to the offload store after the reduction.  The next backward pass and the optimizer
read the shard.  The norms of its gradients stay in memory.  Changes such as gradient clipping are applied when the
shard is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm.communicator import Communicator, ReduceName
from farandole.comm.compression import Compression
from farandole.comm.compression.call import check
from farandole.memory.offloaded_tensor import OffloadedTensors
from farandole.memory.tracker import memory_tag
from farandole.parallel.zero.buffer_pool import BufferPool, empty
from farandole.parallel.zero.sharding import BucketPlan

Change = Callable[[Tensor], object]
"""A function that changes the result of a bucket in place.  It treats each element separately."""


class Bucket:
    """Stores and reduces the gradients of the parameters in `plan`, in the dtype of the master weights.

    Args:
        number: the index of this rank's shard.
        shards: the ranks among which the result is sharded; None if the result is not sharded.
        replicas: the ranks with the same shard; None if no other rank has it.
        pool: the pool of unsharded buffers (`zero` 2 and 3); None for a persistent buffer.
        place: the index of the bucket in the pool.
        compression: the compression for the all-reduce between hosts.
        offload: the offload store for the shard (`zero` 2 and 3); None to keep the shard in memory.
    """

    def __init__(
        self,
        plan: BucketPlan,
        number: int,
        shards: Communicator | None,
        replicas: Communicator | None,
        *,
        pool: BufferPool | None = None,
        place: int = 0,
        compression: Compression | None = None,
        offload: OffloadedTensors | None = None,
    ) -> None:
        self.plan = plan
        self.parameters = list(plan.parameters)
        self.ready = False
        """Whether every expected gradient of this backward pass has arrived."""
        self.in_flight = False
        """Whether the reduction was started but `wait` was not called."""
        self.was_reduced = False
        """Whether a reduction was started in this backward pass."""
        self.compressor = None
        self._layout, self._number, self._dtype = plan.layout, number, plan.master_dtype
        self._device = plan.device
        self.shards, self._replicas = shards, replicas
        self._weight = plan.ranks.weight
        self._op: ReduceName = "avg" if self._weight is None else "sum"
        self._pool, self._place = pool, place
        self._stored = (
            None
            if offload is None or pool is None
            else offload.make(plan.layout.shard_length, self._dtype, self._device)
        )
        self._in_record = False  # whether the record contains the result, without pending changes
        self._changes: list[Change] = []
        self._norms: dict[int, Tensor] = {}
        self._factor: float | None = 1.0  # factor of the norms; None if it is unknown
        self._buffer: Tensor | None = None
        self._views: list[Tensor] = []
        self._shown: list[Tensor] = []
        self._is_shown = [False] * len(self.parameters)
        """Whether `.grad` has been a view of the buffer since the last gradient of this step arrived."""
        self._reduced: Tensor | None = None
        self._target: Tensor | None = None
        self._work: dist.Work | None = None
        self._replicas_next = False
        self._has_result = False  # result of an earlier backward pass of this step
        self._arrived: set[int] = set()  # parameters with a gradient in this backward pass
        self._expected = set(range(len(self.parameters)))
        self._used: set[int] = set()  # parameters that had a gradient in any earlier step
        self.is_in_place = pool is None and self._dtype == plan.dtype
        """Whether autograd adds further gradients directly to the buffer."""
        self.received = [False] * len(self.parameters)
        if pool is None:
            with memory_tag("gradients", self.parameters):
                buffer = empty(shards or replicas, plan.layout.length, self._dtype, self._device)
                plan.layout.zero_gaps(self._use(buffer))
        if compression is not None and replicas is not None:
            check(replicas, self.parameters[0])
            shapes = list(zip(plan.layout.starts, plan.layout.shapes, strict=True))
            self.compressor = compression.for_tensor(plan.layout.length, shapes)
        self.begin_pass()

    # ---- the path of a gradient ----

    def in_the_way(self) -> list[Bucket]:
        """Return the buckets whose reductions must finish before this bucket can allocate memory."""
        if self._pool is None or self._buffer is not None:
            return []
        return self._pool.in_the_way(self._place)

    def first_to_launch(self) -> Bucket | None:
        """Return the bucket whose reduction must start before this bucket can allocate memory, or None."""
        if self._pool is None or self._buffer is not None:
            return None
        return self._pool.first_to_launch()

    def accumulate(self, index: int, gradient: Tensor) -> None:
        """Add the `gradient` of parameter `index` to the bucket."""
        parameter = self.parameters[index]
        if self._use_zero_copy(gradient):
            parameter.grad = None
        else:
            self._acquire()
            view = self._views[index]
            if (
                gradient.data_ptr() != view.data_ptr() or not view.numel()
            ):  # otherwise it is already in the buffer
                if self.received[index] and not self._is_shown[index]:
                    view.add_(gradient)
                else:  # `.grad` was the sum of all gradients until the program cleared it
                    view.copy_(gradient)
                parameter.grad = self._gradient_view(index) if self.is_in_place else None
            self._is_shown[index] = self.is_in_place
        self.received[index] = True

    def discard(self, index: int) -> None:
        """Discard the unreduced gradient of parameter `index`."""
        if self.in_flight:
            self.wait()
        self.received[index] = self._is_shown[index] = False
        self._arrived.discard(index)

    def discard_cleared(self) -> None:
        """Discard the gradients of parameters whose `.grad` has been cleared."""
        for index, parameter in enumerate(self.parameters):
            if self._is_shown[index] and parameter.grad is None:
                self.discard(index)

    @property
    def holds_gradients(self) -> bool:
        """Return whether the bucket holds gradients of this step."""
        return self._has_result or any(self.received)

    def holds(self, index: int, gradient: Tensor | None) -> bool:
        """Return whether `gradient` is this bucket's view for parameter `index`.

        If so, autograd accumulates directly in the bucket's buffer.
        """
        return self.is_in_place and self.received[index] and gradient is self._shown[index]

    def is_complete(self, index: int) -> bool:
        """Mark parameter `index` as complete in this pass; return whether all expected parameters are complete."""
        self._arrived.add(index)
        self.ready = self._expected <= self._arrived
        return self.ready

    def has_arrived(self, index: int) -> bool:
        """Return whether the gradient of parameter `index` has arrived in this pass."""
        return index in self._arrived

    def reduce_async(self) -> None:
        """Start the reduction.  Do not use the gradients or the result before `wait` returns."""
        whole = self._acquire()
        for view, received in zip(self._views, self.received, strict=True):
            if not received:
                view.zero_()
        if self._weight is not None:
            whole.mul_(self._weight)
        own = self._layout.shard(whole, self._number)
        # the result of a further backward pass is added to the earlier one
        self._target = own if self._has_result or self._pool is None else self.reduced
        if self._target is own:
            self.prefetch()
        if self.shards is not None:
            self._work = self.shards.reduce_scatter(self._target, whole, self._op, async_op=True)
        elif self._target is not own:
            self._target.copy_(own)
        self.in_flight = self.was_reduced = True
        self._replicas_next = self._replicas is not None
        if self.shards is None:
            self.advance()

    @property
    def held_nbytes(self) -> int:
        """Return the current size of the unsharded buffer in bytes; 0 if the buffer is not allocated."""
        return 0 if self._buffer is None else self._buffer.nbytes

    @property
    def whole_nbytes(self) -> int:
        """Return the size of the unsharded buffer in bytes, even if the buffer is not allocated."""
        return self._layout.length * self._dtype.itemsize

    @property
    def is_late(self) -> bool:
        """Return whether the bucket has received gradients whose reduction has not started."""
        return any(self.received) and not self.in_flight

    @property
    def has_two_stages(self) -> bool:
        """Return whether a reduction over replicas follows the reduction over shards."""
        return self.shards is not None and self._replicas is not None

    def advance(self) -> None:
        """Start the reduction over replicas, if one is pending."""
        if not self._replicas_next or not self.in_flight:
            return
        self._wait_for_work()
        assert self._replicas is not None
        assert self._target is not None
        self._replicas_next = False
        self._work = self._replicas.all_reduce(
            self._target, self._op, compression=self.compressor, async_op=True
        )

    def wait(self) -> None:
        """Wait for the reduction to finish, and release the buffer if it comes from a pool."""
        self.advance()
        self._wait_for_work()
        self.in_flight = False
        if self._pool is None or self._buffer is None:
            return
        if self._target is not None and self._target is not self.reduced:
            self.reduced.add_(self._target)
        self._has_result = True
        self.received = [False] * len(self.parameters)
        self._release(self._pool)
        self._offload()

    @property
    def reduced(self) -> Tensor:
        """Return this rank's result (the full result or a shard) as a flat tensor in memory.

        The values are undefined before the first reduction of a step.  With `zero` 2 and 3, the first use
        allocates the memory, and `clear` or offloading releases it.
        """
        if self._reduced is None:
            with memory_tag("gradients", self.parameters):
                if self._pool is None:
                    self._reduced = self._layout.shard(self._acquire(), self._number)
                elif self._in_record:
                    self._reduced = self._read(self._device)
                    self._in_record = False
                elif self._stored is not None:
                    self._reduced = self._stored.empty()
                else:
                    self._reduced = torch.empty(
                        self._layout.shard_length, dtype=self._dtype, device=self._device
                    )
        return self._reduced

    @property
    def holds_result(self) -> bool:
        """Return whether a result exists, in memory or offloaded."""
        return self._reduced is not None or self._in_record

    # ---- offloaded results ----

    @property
    def is_offloaded(self) -> bool:
        """Return whether the result is offloaded after each reduction."""
        return self._stored is not None

    def prefetch(self) -> None:
        """Start reading an offloaded result into memory."""
        if self._in_record and self._stored is not None:
            with memory_tag("gradients", self.parameters):
                self._stored.prefetch()

    @contextmanager
    def in_memory(self, device: torch.device | None = None) -> Iterator[Tensor]:
        """Return a context manager that yields the result in memory.

        An offloaded result is loaded onto `device` (default: the bucket's device).
        """
        if self._in_record:
            yield self._read(device or self._device)
        else:
            yield self.reduced

    def change(self, change: Change, factor: float | None = None) -> None:
        """Apply `change` to the result now or, if the result is offloaded, at the next read.

        Args:
            factor: the factor by which `change` multiplies the norms of the result; None if unknown.
        """
        if not self._in_record:
            change(self.reduced)
            return
        self._changes.append(change)
        self._factor = None if factor is None or self._factor is None else self._factor * factor

    def scale(self, factor: float) -> None:
        """Multiply the result by `factor`."""
        self.change(lambda reduced: reduced.mul_(factor), abs(factor))

    @property
    def norms(self) -> dict[int, Tensor] | None:
        """Return a dict that maps parameter indices to the Euclidean norms of their gradients on this rank.

        Return None if the result is not offloaded or the norms are unknown.
        """
        if not self._in_record or self._factor is None:
            return None
        return {index: norm * self._factor for index, norm in self._norms.items()}

    def _offload(self) -> None:
        if self._stored is None:
            return
        self._norms = {
            part.index: norm_of(self.reduced[part.offset : part.offset + part.length])
            for part in self._layout.ranges(self._number)
        }
        self._stored.write(self.reduced)
        self._reduced, self._in_record = None, True
        self._changes, self._factor = [], 1.0

    def _read(self, device: torch.device) -> Tensor:
        assert self._stored is not None
        with memory_tag("gradients", self.parameters):
            values = self._stored.read(device)
        if self._changes and self._stored.shares_memory(device):
            values = values.clone()
        for change in self._changes:
            change(values)
        return values

    # ---- steps and passes ----

    def begin_pass(self) -> None:
        """Prepare the bucket for a backward pass."""
        self._arrived.clear()
        self.ready, self.was_reduced = not self._expected, False

    def expect(self, used: Sequence[bool]) -> None:
        """Expect gradients only for parameters that had a gradient in this step or an earlier step.

        Args:
            used: for each parameter, whether it had a gradient in this step.
        """
        self._used.update(index for index, has_gradient in enumerate(used) if has_gradient)
        self._expected = set(self._used)

    def clear(self) -> None:
        """Discard all gradients, to begin a new step."""
        self._wait_for_work()  # left by a failed backward pass
        self._has_result = self.in_flight = False
        if self._pool is not None:
            if self._buffer is not None:
                self._release(self._pool)
            self._reduced, self._in_record = None, False
            if self._stored is not None:
                self._stored.drop()
        self.received = [False] * len(self.parameters)
        self._is_shown = [False] * len(self.parameters)
        self.begin_pass()

    def resume(self, used: Sequence[bool]) -> None:
        """Prepare the bucket so that further backward passes add to the result.

        Args:
            used: for each parameter, whether it has a gradient in the result.

        Raises:
            RuntimeError: if the reduction is a weighted sum and the buffer is persistent.
        """
        if self._pool is not None:
            return  # each pass is reduced, and its result added
        if self._weight is not None:
            raise RuntimeError(
                "a second backward pass would add to gradients that are already reduced over ranks: call "
                "optimizer.zero_grad() first, or pass all micro-batches of the step to "
                "engine.forward_backward"
            )
        if self.shards is not None:
            # averaging `own` with the zeros of the other ranks restores this rank's result
            own = self.reduced * self.shards.size
            self._acquire().zero_()
            self.reduced.copy_(own)
        self.received = list(map(bool, used))
        self._is_shown = [False] * len(self.parameters)

    def gradient_view(self, index: int) -> Tensor:
        """Return the view of the persistent buffer to use as the `.grad` of parameter `index`."""
        self._reduced = self._acquire()
        return self._gradient_view(index)

    def own_gradients(self) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the unsharded buffer, and a dict that maps parameter indices to this rank's gradients in the buffer.

        Call this method before the reduction.  The buffer's other elements are undefined.
        """
        whole = self._acquire()
        return whole, {index: view for index, view in enumerate(self._views) if self.received[index]}

    # ---- memory ----

    def _gradient_view(self, index: int) -> Tensor:
        # a separate view: `Module.to` replaces the memory of `.grad`, which must not affect `_views`
        view, shown = self._views[index], self._shown[index]
        if shown.data_ptr() != view.data_ptr() or shown.dtype != view.dtype:
            shown = self._shown[index] = view.detach()
        return shown

    def _use_zero_copy(self, gradient: Tensor) -> bool:
        """Use the memory of `gradient` as the buffer if possible; return whether it is used."""
        if self._pool is None or not self._pool.zero_copy or self._buffer is not None:
            return False
        if gradient.layout != torch.strided or not gradient.is_contiguous():
            return False
        self._pool.hold(self)
        self._use(gradient.detach().view(-1))
        return True

    def _acquire(self) -> Tensor:
        if self._buffer is not None:
            return self._buffer
        assert self._pool is not None  # without a pool the buffer is persistent
        return self._use(self._pool.acquire(self, self._place))

    def _use(self, buffer: Tensor) -> Tensor:
        self._buffer, self._views = buffer, self._layout.views(buffer)
        if self._pool is None:
            self._shown = [view.detach() for view in self._views]
        return buffer

    def _release(self, pool: BufferPool) -> None:
        self._buffer, self._views, self._target = None, [], None
        pool.release(self, self._place)

    def _wait_for_work(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


def norm_of(tensor: Tensor, order: float = 2) -> Tensor:
    """Return the vector norm of order `order` of `tensor`, computed in at least fp32."""
    return torch.linalg.vector_norm(tensor, order, dtype=torch.promote_types(tensor.dtype, torch.float32))
