"""The dispatcher, which runs a group's operations in order until the group is destroyed."""

from __future__ import annotations

import _thread
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm.core import Core, GroupCore
from farandole.comm.direct_calls import AsyncDirectCalls, DirectCalls, DirectMethods, NoDirectCalls
from farandole.comm.ending import leave_at_end
from farandole.comm.errors import CommunicationError
from farandole.comm.fallback import TorchCore
from farandole.comm.forks import invalidate_after_fork
from farandole.comm.native_core import NativeCore
from farandole.comm.operations import Operation
from farandole.comm.work import Call, WorkQueue, flags_here

PATIENCE_S = 1.0
"""How long destroying a group waits for pending work, in seconds."""


class Dispatcher:
    """Runs the calls of a group in order, each on an implementation that supports the tensors of the call.

    Args:
        core: The implementation for the group.
        name: The name of the group in error messages.
        fallback: The implementation for CPU tensors that `core` does not support.
        device_fallback: The implementation for CUDA tensors that `core` does not support.
    """

    def __init__(
        self,
        core: Core,
        name: str,
        fallback: TorchCore | None = None,
        device_fallback: TorchCore | None = None,
    ) -> None:
        self.core = core
        self.name = name
        self.fallback, self.device_fallback = fallback, device_fallback
        self.queue = WorkQueue(name, core.whereabouts)
        self.direct: Any = NoDirectCalls()
        self.direct_async: Any = NoDirectCalls()
        if isinstance(core, NativeCore):
            self.direct, self.direct_async = DirectCalls(core, self.queue), AsyncDirectCalls(core, self.queue)
        elif isinstance(core, GroupCore):
            self.direct = DirectMethods(core, self.queue)
        self._invalid: str | None = None  # the reason, in a forked child
        if not isinstance(core, TorchCore):
            leave_at_end(self)
            invalidate_after_fork(self)

    # ---- calls ----

    def serves(self, *tensors: Sequence[Tensor]) -> bool:
        """Return whether `core` supports the tensors.

        Raises:
            RuntimeError: if the group was destroyed or was created before this process was forked.
        """
        if self._invalid:
            raise CommunicationError(f"group {self.name!r}: {self._invalid}")
        if self.core.closed:
            raise RuntimeError(f"group {self.name!r} was destroyed; create a new group")
        return all(self.core.supports(each) for each in tensors)

    def core_for(self, *tensors: Sequence[Tensor]) -> Core:
        """Return the implementation that supports the tensors."""
        if self.serves(*tensors) or self.fallback is None:
            return self.core
        return self.fallback_for(tensor for each in tensors for tensor in each)

    def fallback_for(self, tensors: Iterable[Tensor]) -> TorchCore:
        """Return the implementation for tensors that `core` does not support."""
        chosen = self.fallback
        if self.device_fallback is not None and any(tensor.is_cuda for tensor in tensors):
            chosen = self.device_fallback
        assert chosen is not None
        return chosen

    def run(
        self,
        operation: Operation,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        *constants: Any,
        async_op: bool = False,
    ) -> dist.Work:
        """Run an operation after all earlier operations; if `async_op` is set, return its pending work immediately."""
        core = self.core_for(outputs, inputs)
        return self.issue(operation.call(core, outputs, inputs, *constants), outputs, async_op, core=core)

    def issue(
        self,
        call: Call,
        tensors: Sequence[Tensor],
        async_op: bool,
        *,
        timeout_s: float | None = None,
        core: Core | None = None,
    ) -> dist.Work:
        """Run `call`, which writes to `tensors`, after all earlier calls of the group.

        Args:
            call: The function that runs the call; its argument is `flags`.
            tensors: The tensors to which `call` writes.
            async_op: Whether to return pending work immediately.
            timeout_s: The timeout of this call, in seconds; None for the group's timeout.
            core: The implementation on which `call` runs; None for the group's own implementation.
        """
        core = core or self.core
        if core.returns_work:
            work: dist.Work = call(0)
            if not async_op:
                work.wait()
            return work
        if timeout_s is not None:
            call = core.within(timeout_s, call)
        return self.queue.submit(call, tensors) if async_op else self.queue.run(call, tensors)

    def prepare(
        self, operation: Operation, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *constants: Any
    ) -> PersistentOperation:
        """Return a persistent operation with these arguments, which are validated only once."""
        core = self.core_for(outputs, inputs)
        call = operation.prepare(core, outputs, inputs, *constants)
        return PersistentOperation(self, core, call, outputs, inputs)

    def made(self, make: Callable[[int], Tensor]) -> Tensor:
        """Run the collective allocation `make` after all earlier calls, and return the tensor."""
        made: list[Tensor] = []
        self.queue.run(lambda flags: made.append(make(flags)), [])
        return made[0]

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in the memory that makes operations fastest.

        Every rank must call this method.
        """
        core = self.core_for()
        if core.returns_work:
            return torch.empty(*shape, dtype=dtype, device="cpu")
        return self.made(lambda flags: core.allocate(shape, dtype, flags))

    def receive_buffer(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return an uninitialized tensor with the dtype and device of `like` for the result of a collective."""
        if like.is_cpu:
            return self.core.receive_buffer(shape, like.dtype)
        return like.new_empty(shape)

    # ---- shutdown ----

    def close(self) -> None:
        """Leave the group and notify the ranks that are waiting for this rank.

        Pending work fails unless it completes within `PATIENCE_S`.
        """
        if self._invalid:
            return
        if not self.core.closed:
            at_rest = self._rest(PATIENCE_S)
            if not at_rest:
                self.core.give_up()
                at_rest = self._rest(PATIENCE_S)
            if at_rest:  # otherwise a callback on another thread may use the memory
                self.core.close()
        for fallback in (self.fallback, self.device_fallback):
            if fallback is not None:
                fallback.close()

    def abort(self, note: str = "") -> None:
        """Leave the group immediately; all pending calls of this process fail.

        Other ranks report `note` as the reason.
        """
        if self._invalid:
            return
        if note:
            self.core.leave(note)
        self.core.give_up()
        self.close()

    def abandon(self, note: str, patience_s: float) -> None:
        """Leave the group at program exit, but do not free its memory.

        Stop the threads of the group, and notify the other ranks.  Implementations that can complete calls during
        program exit do not notify the other ranks if all pending calls and messages complete in time.

        Args:
            note: The reason shown in the errors of the other ranks.
            patience_s: How long to wait for pending calls and for pending messages, in seconds.
        """
        if self._invalid:
            return
        if self.core.completes_at_exit:
            patience_s /= 2
            if self._rest(patience_s):
                return
        self.core.leave(note)
        self.core.give_up()
        self._rest(patience_s)

    def invalidate(self, reason: str) -> None:
        """Make every later call fail with `reason`; called in a forked child."""
        self._invalid = reason
        self.queue.invalidate(reason)
        if isinstance(self.core, GroupCore):
            self.core.invalidate(reason)

    def _rest(self, patience_s: float) -> bool:
        """Wait up to `patience_s` seconds each for calls and for messages; return whether all completed."""
        return self.queue.close(patience_s) and self.core.rest(patience_s)


class PersistentOperation:
    """An operation whose arguments are validated and converted once (MPI-4 persistent collectives).

        op = comm.all_reduce_init(buffer)
        op()                    # blocks
        work = op.start()       # returns immediately

    The operation keeps its tensors alive and uses their memory in every run.  Create a new operation after calling
    `resize_` or `set_` on a tensor.
    """

    __slots__ = (
        "_call",
        "_check",
        "_core",
        "_dispatcher",
        "_on_device",
        "_queue",
        "_tensors",
        "_waiting",
    )

    def __init__(
        self,
        dispatcher: Dispatcher,
        core: Core,
        call: Call,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
    ) -> None:
        queue = dispatcher.queue
        self._call, self._check = call, core.check
        self._waiting = queue.waiting
        self._dispatcher, self._core, self._queue = dispatcher, core, queue
        self._tensors = [*outputs], [*inputs]
        self._on_device = any(tensor.is_cuda for tensor in (*outputs, *inputs))

    def __call__(self) -> None:
        """Run the operation after all earlier operations; block until this rank may use the result."""
        if self._waiting or not self._queue.acquire(False):  # `WorkQueue.enter`, inlined
            self._in_turn(async_op=False)
            return
        self._queue.holder = _thread.get_ident()
        try:
            status = self._call(flags_here())
            if status:
                self._check(status)
        finally:
            self._queue.leave()

    def start(self) -> dist.Work:
        """Start the operation and return its work immediately."""
        return self._in_turn(async_op=True)

    def _in_turn(self, async_op: bool) -> dist.Work:
        # raises for a destroyed group, and waits for kernels, because another thread may read the tensors
        self._dispatcher.serves(*(self._tensors if self._on_device else ()))
        return self._dispatcher.issue(self._checked, self._tensors[0], async_op, core=self._core)

    def _checked(self, flags: int) -> Any:
        status = self._call(flags)
        if status and not self._core.returns_work:
            self._check(status)
        return status
