"""Activations moved out of the device's memory between forward and backward, and back in time.

    swap = swap_activations(model, "host")            # CUDA: to pinned memory of the host
    swap = swap_activations(model, "disk:/scratch")   # a CPU: to a file on a disk
    loss(model(x)).backward()                         # as ever, any number of times
    swap.close()

What autograd saves in the model's forward pass is copied away while the forward pass goes on, and let go (Rhu et al.,
2016, "vDNN").  When the backward pass first wants something of a block, all that is left of that block and all of the
block before it is fetched meanwhile.  Gradients are the same to the bit.  It goes well with `apply_recompute(model,
"block")`, of which the inputs of blocks are left to swap; what a selective recomputation keeps stays where it is.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from farandole.memory.blocks import blocks_of
from farandole.memory.calls import release, surround, surrounding
from farandole.memory.errors import SwapError
from farandole.memory.fakes import device_of
from farandole.memory.recomputation import recomputing
from farandole.memory.selective import measuring
from farandole.memory.stores import Copy, DiskStore, HostStore, Store

__all__ = ["Swap", "SwapError", "swap_activations"]

THRESHOLD_BYTES = 1 << 20
BEHIND_BYTES = 256 << 20
AHEAD_BYTES = 256 << 20


def swap_activations(
    model: nn.Module,
    to: str,
    *,
    threshold_bytes: int = THRESHOLD_BYTES,
    behind_bytes: int = BEHIND_BYTES,
    ahead_bytes: int = AHEAD_BYTES,
) -> Swap:
    """Swap what `model` saves for its backward pass, until `close`.

    `to` is "host" for a model on a CUDA device, "disk:FOLDER" for one on the CPU: an unnamed file that is gone with
    the process.  Tensors whose memory is smaller than `threshold_bytes` stay, as do parameters and buffers.  At most
    `behind_bytes` wait to be copied away: then the forward pass waits.  At most `ahead_bytes` beyond what is asked for are
    fetched ahead.  Swapping to a disk changes how this process allocates (see `allocator`) until `close`.

    Raises ValueError for a place that does not suit the model or is not known, SwapError for a folder that cannot be
    written to; a forward or backward pass raises SwapError when the disk is full or fails.
    """
    for name, value in (("threshold_bytes", threshold_bytes), ("ahead_bytes", ahead_bytes)):
        if value < 0:
            raise ValueError(f"{name}={value} is negative")
    if behind_bytes < 1:
        raise ValueError(f"behind_bytes={behind_bytes}: at least one byte must be allowed to wait")
    if surrounding(model, _Swapping) is not None:
        raise ValueError("the activations of this model are swapped already: close() that first")
    return Swap(
        model, _store(to, device_of(model), threshold_bytes), threshold_bytes, behind_bytes, ahead_bytes
    )


def _store(to: str, device: torch.device, threshold_bytes: int) -> Store:
    kind, _, folder = to.partition(":")
    if kind == "host" and not folder:
        if device.type == "cuda":
            return HostStore(device)
        raise ValueError(
            f"swap='host' moves activations from a CUDA device to the host, and this model is on {device}: "
            "swap='disk:FOLDER' moves them to a disk"
        )
    if kind == "disk" and folder:
        if device.type == "cpu":
            return DiskStore(folder, threshold_bytes)
        raise ValueError(
            f"swap={to!r} is for models on the CPU, and this one is on {device}: swap='host' works there"
        )
    raise ValueError(f"swap={to!r} is not known; it is 'host' (CUDA) or 'disk:FOLDER' (CPU)")


class _Saved:
    """The memory that one or more saved tensors lie in, in the device until it is copied, then in the store."""

    def __init__(self, tensor: Tensor, number: int, block: int) -> None:
        storage = tensor.untyped_storage()
        self.number, self.block = number, block
        self.nbytes = storage.nbytes()
        self.memory = weakref.ref(storage)
        self.version = tensor._version
        self.original: Tensor | None = tensor.detach()  # shares the version; until the copy is made
        self.copy: Copy | None = None
        self.fetching = False
        self.fetched: Tensor | None = None
        self.changed = False
        self.unread = 0
        """Saved tensors that the backward pass has not asked for yet."""


class _View:
    """What autograd holds in place of a tensor: where it lies in its memory."""

    def __init__(self, saved: _Saved, tensor: Tensor) -> None:
        self.saved = saved
        self.dtype, self.device = tensor.dtype, tensor.device
        self.place = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self.read = False
        saved.unread += 1

    def done(self) -> None:
        """This one has been asked for, or never will be; the last one lets the memory go."""
        if not self.read:
            self.read = True
            self.saved.unread -= 1
            if self.saved.unread == 0:
                self.saved.fetched, self.saved.fetching = None, False

    def __del__(self) -> None:
        self.done()


class Swap:
    """Swapping of one model's activations, made by `swap_activations`; a context manager that closes.

    `written_bytes` and `read_bytes` count what was copied away and back.
    """

    def __init__(
        self, model: nn.Module, store: Store, threshold_bytes: int, behind_bytes: int, ahead_bytes: int
    ) -> None:
        self.model = model
        self.written_bytes = self.read_bytes = 0
        self._store = store
        self._threshold, self._behind, self._ahead = threshold_bytes, behind_bytes, ahead_bytes
        self._lock = threading.RLock()
        self._known: weakref.WeakValueDictionary[int, _Saved] = weakref.WeakValueDictionary()
        self._in_order: weakref.WeakValueDictionary[int, _Saved] = weakref.WeakValueDictionary()
        self._count = 0
        self._block = 0
        self._first_of_block = {0: 0}
        self._waiting: deque[_Saved] = deque()
        self._waiting_bytes = 0
        self._stays: set[int] = set()
        self._closed = False
        self._around: list[tuple[nn.Module, _Entering | _Swapping]] = [
            (block, _Entering(self)) for _, block in blocks_of(model) if block is not model
        ]
        self._around.append((model, _Swapping(self)))
        for module, around in self._around:
            surround(module, around)

    def close(self) -> None:
        """Swap no more, and give back file and threads; what is saved now cannot be used for a backward pass."""
        if self._closed:
            return
        self._closed = True
        for module, around in self._around:
            release(module, around)
        self._waiting.clear()
        self._store.close()

    def __enter__(self) -> Swap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hooks(self, *living: Any) -> AbstractContextManager[Any]:
        """The hooks for one forward pass; memory of the tensors in `living` stays where it is."""
        tensors = [one for one in tree_leaves(living) if isinstance(one, Tensor)]
        tensors += [*self.model.parameters(), *self.model.buffers()]
        self._stays = {t.untyped_storage()._cdata for t in tensors if t.layout is torch.strided}
        with self._lock:
            oldest = min((saved.block for saved in self._in_order.values()), default=self._block)
            self._first_of_block = {b: n for b, n in self._first_of_block.items() if b >= oldest - 1}
            self.enter_block()
        return saved_tensors_hooks(self.pack, self.unpack)

    def enter_block(self) -> None:
        """What is saved from now on is of another block."""
        self._block += 1
        self._first_of_block[self._block] = self._count

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """What autograd keeps in place of `tensor`, in a forward pass under `hooks`."""
        if not self._leaves(tensor):
            return tensor.detach()  # an output that is saved as it is would keep its own graph alive
        with self._lock:
            self._let_go(self._behind)
            key = tensor.untyped_storage()._cdata
            saved = self._known.get(key)
            if (
                saved is None
                or saved.memory() is not tensor.untyped_storage()
                or saved.version != tensor._version
            ):
                saved = self._save(tensor)
                self._known[key] = saved
            return _View(saved, tensor)

    def _leaves(self, tensor: Tensor) -> bool:
        if (
            type(tensor) is not Tensor
            or tensor.layout is not torch.strided
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return False
        if tensor.device.type != self._store.device.type or tensor.untyped_storage()._cdata in self._stays:
            return False
        root = tensor if tensor._base is None else tensor._base
        if root.is_leaf and root.requires_grad:  # a parameter whose data was exchanged since the pass began
            return False
        return tensor.untyped_storage().nbytes() >= max(self._threshold, 1)

    def _save(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor, self._count, self._block)
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        saved.copy = self._store.write(whole)
        self._in_order[self._count] = saved
        self._count += 1
        self._waiting.append(saved)
        self._waiting_bytes += saved.nbytes
        self.written_bytes += saved.nbytes
        return saved

    def _let_go(self, allowed: int) -> None:
        """Let go of memory that has been copied, and wait until at most `allowed` bytes are still to be.

        It is done here, in the thread that computes, because a change in place is seen by its version only when the
        operation is over: in this thread, none is under way.
        """
        while self._waiting:
            saved = self._waiting[0]
            assert saved.copy is not None
            if self._waiting_bytes <= allowed and not saved.copy.written():
                return
            saved.copy.wait_written()
            self._waiting.popleft()
            self._waiting_bytes -= saved.nbytes
            assert saved.original is not None
            saved.changed = saved.original._version != saved.version
            saved.original = None

    def unpack(self, packed: Tensor | _View) -> Tensor:
        """The tensor, when the backward pass asks for it."""
        if isinstance(packed, Tensor):
            return packed
        if self._closed:
            raise SwapError("this swap is closed: run backward passes before close()")
        saved = packed.saved
        with self._lock:
            self._let_go(self._behind)
            self._fetch_ahead(saved)
            data = self._data(saved)
        tensor = torch.empty(0, dtype=packed.dtype, device=packed.device)
        tensor.set_(data.untyped_storage(), *packed.place)
        packed.done()
        if saved.unread == 0:  # in the second pass over a retained graph done() has nothing more to do
            saved.fetched, saved.fetching = None, False
        return tensor

    def _data(self, saved: _Saved) -> Tensor:
        original = saved.original
        if saved.changed if original is None else original._version != saved.version:
            raise RuntimeError(
                "a tensor that the backward pass needs was modified in place after it was saved: use the operation "
                "that is not in place (torch raises the same without swapping)"
            )
        if original is not None:
            return original
        if saved.fetched is None:
            assert saved.copy is not None
            self._fetch(saved)
            saved.fetched = saved.copy.read()
        return saved.fetched

    def _fetch(self, saved: _Saved) -> None:
        if saved.original is None and saved.fetched is None and not saved.fetching:
            assert saved.copy is not None
            saved.copy.fetch()
            saved.fetching = True
            self.read_bytes += saved.nbytes

    def _fetch_ahead(self, wanted: _Saved) -> None:
        """Begin to fetch `wanted`, then what was saved before it in its block and in the block before that."""
        self._fetch(wanted)
        first = self._first_of_block.get(wanted.block - 1, self._first_of_block.get(wanted.block, 0))
        ahead = 0
        for number in range(wanted.number - 1, first - 1, -1):
            saved = self._in_order.get(number)
            if saved is not None and saved.unread:
                ahead += saved.nbytes
                if ahead > self._ahead:
                    return
                self._fetch(saved)


class _Swapping:
    """Around the model: its forward pass runs under the hooks."""

    def __init__(self, swap: Swap) -> None:
        self.swap = swap

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not torch.is_grad_enabled() or measuring():
            return call(*args, **kwargs)
        with self.swap.hooks(args, kwargs):
            return call(*args, **kwargs)


class _Entering:
    """Around a block: what is saved in it is fetched together."""

    def __init__(self, swap: Swap) -> None:
        self.swap = swap

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if torch.is_grad_enabled() and not recomputing():
            self.swap.enter_block()
        return call(*args, **kwargs)
