"""What a process group of the backend `farandole` is, apart from its collectives: name, means, life and end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm.algorithms.steps import Combine
from farandole.comm.collectives import HostCollectives
from farandole.comm.dtypes import REDUCTION_NAMES
from farandole.comm.ending import leave_at_end
from farandole.comm.fallback import LazyBackend, has_nccl, torch_group
from farandole.comm.host_group import HostGroup
from farandole.comm.messages import Messages
from farandole.comm.spanning import SpanningCollectives
from farandole.comm.transport import WireTransport
from farandole.comm.two_level import combine_in_core
from farandole.comm.work import Call, Lane, seconds_of

PATIENCE_S = 1.0
"""How long work that nobody waited for may still take when its group is destroyed."""


class GroupBase(dist.ProcessGroup):
    """The parts of a process group that its collectives stand on.

    `host` and `carrier`, our own collectives, are None where the core is missing; `store` is for torch's own groups
    beside them, `address` where they listen.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        host: HostGroup | None,
        carrier: HostCollectives | SpanningCollectives | None,
        address: str | None,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub knows another constructor only
        self._rank, self._size = rank, size
        self._store = store
        self._timeout = timeout
        self._group_name = name
        self._group_desc = "undefined"
        self._host = host
        self._carrier = carrier
        self._address = address
        self._alone_on_host = host if isinstance(carrier, HostCollectives) else None
        self._lane = Lane(name, host.whereabouts if host is not None else str)
        self._messages = Messages()
        self._torch_group: dist.ProcessGroup | None = None
        self._making_torch_group = threading.Lock()
        if host is not None:
            self._core_all_reduce = host.core.frd_all_reduce
            leave_at_end(self)

    # ---- what torch asks a group about itself ----

    def getBackendName(self) -> str:  # noqa: N802 - torch's spelling
        """The name of the backend."""
        return "farandole"

    def name(self) -> str:
        """The name of the backend."""
        return "farandole"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Called by torch after construction."""
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        """By which functional collectives find the group."""
        return self._group_name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Called by torch after construction."""
        self._group_desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        """What the group is for, in words."""
        return self._group_desc

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """By which functional collectives find the group."""
        return self._group_name

    @property
    def group_desc(self) -> str:
        """What the group is for, in words."""
        return self._group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if has_nccl() else [])]

    def _get_backend(self, device: torch.device) -> Any:
        device = torch.device(device)
        if device.type == "cpu" and self._host is not None:
            return LazyBackend(self._inner, self.set_timeout)
        return self._inner()._get_backend(device)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a call waits for the other ranks."""
        self._timeout = timeout
        if self._host is not None:
            self._host.set_timeout(timeout)
        if self._torch_group is not None:
            self._torch_group.set_timeout(timeout)

    # ---- its end ----

    def shutdown(self) -> None:
        """Leave the group; ranks that still wait for this one are told.

        Work that nobody waited for is completed if the other ranks do their part of it soon, else it fails.
        """
        host = self._host
        if host is not None and host.handle:
            at_rest = self._rest(PATIENCE_S)
            if not at_rest:
                host.give_up()
                at_rest = self._rest(PATIENCE_S)
            if (
                at_rest
            ):  # else a thread is still in there, in a callback that does not end: leave it the memory
                host.close()
        if self._torch_group is not None:
            self._torch_group.shutdown()
            self._torch_group = None

    def abort(self) -> None:
        """The same at once: calls under way, of other threads too, fail."""
        if self._host is not None:
            self._host.give_up()
        self.shutdown()

    def abandon(self, note: str, patience_s: float) -> None:
        """The program ends: tell the others how, and bring the threads to rest; the memory goes with the process."""
        if self._host is not None:
            self._host.leave(note)
            self._host.give_up()
            self._rest(patience_s)

    def _rest(self, patience_s: float) -> bool:
        """Whether no call is under way any more, after at most that time (for calls, and for messages)."""
        return self._lane.close(patience_s) and self._messages.close(patience_s)

    # ---- for those who measure ----

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host."""
        if isinstance(self._carrier, SpanningCollectives):
            return self._carrier.hosts.members
        return [list(range(self._size))]

    def between(self, ranks: Sequence[int], channel: int) -> WireTransport:
        """Messages of the core among some ranks, this one too, apart from those of other channels.

        1 and 2 are taken by collectives; `RuntimeError` where the core is missing.
        """
        if self._host is None:
            raise RuntimeError(f"group {self._group_name!r} communicates without the core")
        return WireTransport(self._host, ranks, channel)

    def combine(self, dtype: torch.dtype, reduction: str) -> Combine:
        """What its own algorithms combine two tensors with; `RuntimeError` where the core is missing."""
        if self._host is None:
            raise RuntimeError(f"group {self._group_name!r} communicates without the core")
        return combine_in_core(self._host, dtype, REDUCTION_NAMES.index(reduction))

    # ---- for its collectives ----

    def allocate_shared(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor that every rank of this host can reach: see `Communicator.empty`."""
        carrier = self._carrier_of()
        if carrier is None:
            return torch.empty(*shape, dtype=dtype)
        return self._made(lambda flags: carrier.host.allocate(shape, dtype, flags))

    def allocate_common(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """One tensor for all ranks, which share memory: see `Communicator.common`."""
        carrier = self._carrier_of()
        assert carrier is not None  # see `shares_memory`
        return self._made(lambda flags: carrier.host.allocate_common(shape, dtype, flags))

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks are on one host, and reach each other's memory there."""
        return isinstance(self._carrier_of(), HostCollectives)

    def _made(self, make: Callable[[int], Tensor]) -> Tensor:
        """What a collective call makes, in its turn."""
        made: list[Tensor] = []
        self._lane.run(lambda flags: made.append(make(flags)), [])
        return made[0]

    def _inner(self) -> dist.ProcessGroup:
        """torch's own group over the same ranks; making it is a collective call."""
        with self._making_torch_group:
            if self._torch_group is None:
                self._torch_group = torch_group(
                    self._store, self._rank, self._size, self._timeout, self._group_name, self._address
                )
            return self._torch_group

    def _carrier_of(self, *tensors: Tensor) -> HostCollectives | SpanningCollectives | None:
        """Our own collectives if they can take these tensors, None if torch's must."""
        if self._host is None or not all(t.is_cpu and t.layout is torch.strided for t in tensors):
            return None
        if self._host.handle is None:
            raise RuntimeError(f"group {self._group_name!r} was destroyed; make a new one")
        return self._carrier

    def _issue(
        self, call: Call, tensors: Sequence[Tensor], opts: Any, timeout: timedelta | None = None
    ) -> dist.Work:
        """Run a call in its turn: now, if the caller will wait for it at once."""
        seconds = seconds_of(opts.timeout if timeout is None else timeout)
        if seconds is not None and self._host is not None:
            call = self._host.within(seconds, call)
        if opts.asyncOp:
            return self._lane.submit(call, tensors)
        return self._lane.run(call, tensors)
