"""Collectives on picklable Python objects.

Small objects are sent in one collective with fixed-size messages.  If any object does not fit, a second collective
sends all objects.
"""

from __future__ import annotations

import pickle
import struct
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from farandole.comm.communicator import Communicator

_SLOT = 1024
"""The size in bytes of each rank's first message, which holds the object's length, and the object if it fits."""
_LENGTH = struct.Struct("<q")
_LARGEST_INLINE = _SLOT - _LENGTH.size


def all_gather(comm: Communicator, value: Any) -> list[Any]:
    """Return every rank's value, in rank order."""
    if comm.dispatcher.core.returns_work:
        values: list[Any] = [None] * comm.size
        dist.all_gather_object(values, value, group=comm.group)
        return values
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    slots = torch.empty(comm.size * _SLOT, dtype=torch.uint8, device="cpu")
    comm.all_gather(slots, _slot(data))
    received = slots.numpy().tobytes()
    starts = range(0, len(received), _SLOT)
    lengths: list[int] = [_LENGTH.unpack_from(received, start)[0] for start in starts]
    if max(lengths) <= _LARGEST_INLINE:
        return [
            pickle.loads(received[start + _LENGTH.size : start + _LENGTH.size + length])
            for start, length in zip(starts, lengths, strict=True)
        ]
    parts = list(torch.empty(sum(lengths), dtype=torch.uint8, device="cpu").split(lengths))
    comm.all_gather(parts, torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return [pickle.loads(part.numpy().tobytes()) for part in parts]


def broadcast(comm: Communicator, value: Any, root: int) -> Any:
    """Return the value from rank `root`."""
    if comm.dispatcher.core.returns_work:
        values = [value]
        dist.broadcast_object_list(values, group=comm.group, group_src=root)
        return values[0]
    is_root = comm.rank == root
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL) if is_root else b""
    slot = _slot(data) if is_root else torch.empty(_SLOT, dtype=torch.uint8, device="cpu")
    comm.broadcast(slot, root)
    received = slot.numpy().tobytes()
    (length,) = _LENGTH.unpack_from(received)
    if length <= _LARGEST_INLINE:
        return pickle.loads(received[_LENGTH.size : _LENGTH.size + length])
    whole = torch.frombuffer(bytearray(data if is_root else length), dtype=torch.uint8)
    comm.broadcast(whole, root)
    return pickle.loads(whole.numpy().tobytes())


def _slot(data: bytes) -> Tensor:
    slot = bytearray(_SLOT)
    _LENGTH.pack_into(slot, 0, len(data))
    if len(data) <= _LARGEST_INLINE:
        slot[_LENGTH.size : _LENGTH.size + len(data)] = data
    return torch.frombuffer(slot, dtype=torch.uint8)
