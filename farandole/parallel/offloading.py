"""An optimizer whose masters and states are kept elsewhere, as the engine's ranks update their pieces with it.

Every bucket is a unit: its masters and states come, are updated with this rank's share of the averaged gradients, and
go, while those of the next bucket are on their way.  What the model computes with gets the new values meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from farandole.comm.communicator import Communicator
from farandole.comm.host import host_identity
from farandole.memory.disk import OffloadError, require_space
from farandole.memory.mmap_allocator import MmapAllocator
from farandole.memory.offloaded_optimizer import OffloadedOptimizer, ShardState
from farandole.memory.record_stream import RecordStream, disk_records, host_records
from farandole.memory.tracker import memory_tag
from farandole.parallel.buckets import Bucket
from farandole.parallel.building import Rooms
from farandole.plan import Offloaded

Home = Callable[[Sequence[int]], RecordStream]


def home_at(place: str, comm: Communicator, *, pinned: bool) -> Home:
    """Where `Plan.offload` says, for all ranks of `comm`: makes room for records of the sizes it is called with.

    All ranks call it together.  Raises `OffloadError` on all of them where there is no room for one.
    """
    kind, _, folder = place.partition(":")
    if kind == "host" and not folder:
        return partial(host_records, pinned=pinned)
    if kind != "disk" or not folder:
        raise OffloadError(f"offload={place!r}: 'host' or 'disk:FOLDER'")

    def on_disk(record_bytes: Sequence[int]) -> RecordStream:
        _require_space(folder, sum(record_bytes), comm)
        return disk_records(folder, record_bytes, "masters and states of the optimizer")

    return on_disk


def rooms_at(place: str, offloaded: Offloaded, comm: Communicator, *, accelerator: bool) -> Rooms:
    """Where gradients and weights are made, as `Plan.offload` and `Plan.offloaded` say, by the ranks of `comm`."""
    kind, _, folder = place.partition(":")
    if offloaded == "optimizer":
        return Rooms()
    if kind != "disk":
        raise OffloadError(
            f"offloaded={offloaded!r} with offload={place!r}: it works with offload='disk:FOLDER'"
        )
    if accelerator:
        raise OffloadError(
            f"offloaded={offloaded!r} for a model on an accelerator: its gradients and weights stay there; "
            f"offloaded='optimizer' works"
        )
    room = MmapAllocator(folder, comm)
    return Rooms(gradients=room, weights=room if offloaded == "parameters" else None)


def _require_space(folder: str, needed: int, comm: Communicator) -> None:
    """Refuse on all ranks what does not fit on one; nobody has made a file before."""
    here = host_identity()
    wanted = comm.all_gather_object((here, needed))
    refusal = None
    try:
        require_space(folder, sum(size for host, size in wanted if host == here))
    except OffloadError as error:
        refusal = error
    refusals = comm.all_gather_object(None if refusal is None else str(refusal))
    if refusal is not None:
        raise refusal
    for rank, other in enumerate(refusals):
        if other is not None:
            raise OffloadError(f"rank {rank}: {other}")


class OffloadedUpdate:
    """Has `optimizer`, which knows this rank's pieces, keep their masters and states in a home.

    Its `step` becomes that of the whole engine: `before` has all ranks' gradients averaged, `after` gives all ranks
    the new weights.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: Sequence[Bucket],
        home: Home,
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        own = {id(piece) for group in optimizer.param_groups for piece in group["params"]}
        self._buckets: list[Bucket] = []
        units: list[list[nn.Parameter]] = []
        for bucket in buckets:
            mine = [piece for piece in bucket.pieces if piece is not None and id(piece) in own]
            if mine:
                self._buckets.append(bucket)
                units.append(mine)
        weights = [bucket.weights for bucket in self._buckets if bucket.weights is not None]
        apart = any(weight.masters_apart for weight in weights)
        self._elsewhere = any(bucket.parameters[0].is_cuda for bucket in self._buckets)
        replaced = optimizer.step
        with memory_tag("masters and states"):
            self.state = OffloadedOptimizer(optimizer, units, home, weights=apart or self._elsewhere)
        for weight in weights:
            if self.state.weights:
                weight.master = None
        self._before, self._after = before, after
        # a bound method, as schedulers expect it
        step = MethodType(_step_of(self), optimizer)
        step.__func__.__dict__.update(getattr(replaced, "__dict__", {}))
        optimizer.step = step  # type: ignore[method-assign]

    def step(self) -> None:
        """All of it: gradients averaged, pieces updated, weights published."""
        self._before()
        with memory_tag("masters and states"):
            self.state.step(
                before=self._bring_gradients if self._elsewhere else None,
                after=self._take_weights if self.state.weights else None,
            )
        self._after()

    def saved(self) -> Iterator[tuple[nn.Parameter, ShardState]]:
        """Each piece with its weights and states, to be copied before the next one is asked for."""
        for unit, states in self.state.saved():
            yield from zip(self.state.units[unit], states, strict=True)

    def close(self) -> None:
        """Give the space back; masters and states are gone with it."""
        self.state.close()

    def _bring_gradients(self, unit: int) -> None:
        self._buckets[unit].bring_gradients()

    def _take_weights(self, unit: int) -> None:
        self._buckets[unit].take_weights(self.state.units[unit])


def _step_of(update: OffloadedUpdate) -> Callable[..., Any]:
    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's pieces of the parameters, whose states are kept elsewhere."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        update.step()
        return loss

    return step
