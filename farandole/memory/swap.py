"""Swap activations out of device memory between the forward and the backward pass.

    swap = swap_activations(model, "host")            # CUDA: to pinned host memory
    swap = swap_activations(model, "disk:/scratch")   # CPU: to a file on a disk
    loss(model(x)).backward()                         # as usual, any number of times
    swap.close()

Tensors that autograd saves are copied to an `OffloadStore` and freed during the forward pass (Rhu et al., 2016,
"vDNN").  When the backward pass requests the first tensor of a block, the block's other tensors and the tensors of the
previous block are prefetched.  Gradients are bitwise identical to gradients without swapping.  With
`apply_recompute(model, "block")`, the inputs of blocks are swapped.  Tensors kept by selective recomputation are not
swapped.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from farandole.memory.blocks import blocks_of
from farandole.memory.call_wrappers import Wrapper, unwrap_calls, wrap_calls, wrapper_of
from farandole.memory.disk import OffloadError
from farandole.memory.dry_run import device_of
from farandole.memory.offload_store import DiskStore, HostStore, OffloadStore, Record, Transfer
from farandole.memory.recompute_wrapper import measuring, recomputing
from farandole.plan import Place

THRESHOLD_BYTES = 1 << 20
BEHIND_BYTES = 256 << 20
AHEAD_BYTES = 256 << 20

_M_MMAP_THRESHOLD = -3
_LEAST_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD = 128 << 10, 32 << 20  # the range that glibc accepts


def swap_activations(
    model: nn.Module,
    to: str,
    *,
    passes: Sequence[nn.Module] = (),
    threshold_bytes: int = THRESHOLD_BYTES,
    behind_bytes: int = BEHIND_BYTES,
    ahead_bytes: int = AHEAD_BYTES,
) -> Swap:
    """Swap the tensors that `model` saves for its backward pass, until `close` is called.

    Args:
        to: "host" for a model on a CUDA device, or "disk:FOLDER" for a model on the CPU.  The file in FOLDER is unnamed
            and is deleted when the process ends.  While activations are swapped to a disk, glibc uses a separate
            `mmap` for each large allocation.
        passes: the modules that run forward passes through blocks of `model`; by default `model` itself.
        threshold_bytes: the minimum size of swapped tensors in bytes.  Parameters and buffers are never swapped.
        behind_bytes: the maximum number of bytes waiting to be written.  The forward pass blocks if there are more.
        ahead_bytes: the maximum number of prefetched bytes.

    Raises:
        ValueError: if `to` is unknown, or does not match the model's device.
        OffloadError: if the folder is not writable.  Forward and backward passes raise this error if the disk is full
            or fails.
    """
    for name, value in (("threshold_bytes", threshold_bytes), ("ahead_bytes", ahead_bytes)):
        if value < 0:
            raise ValueError(f"{name}={value}: expected at least 0")
    if behind_bytes < 1:
        raise ValueError(f"behind_bytes={behind_bytes}: expected at least 1")
    store = _checked_store(passes or [model], to, device_of(model))
    if not store.in_memory:
        map_blocks_from(threshold_bytes)
    return Swap(model, store, passes or [model], threshold_bytes, behind_bytes, ahead_bytes)


def check_swap(model: nn.Module, to: str, device: torch.device) -> None:
    """Raise the error, if any, that `swap_activations` would raise for a model that computes on `device`."""
    _checked_store([model], to, device).close()


def _checked_store(passes: Sequence[nn.Module], to: str, device: torch.device) -> OffloadStore:
    if any(wrapper_of(each, Swap) is not None for each in passes):
        raise ValueError(
            "the activations of this model are already swapped; call close() on the existing Swap first"
        )
    return _store(to, device)


def _store(to: str, device: torch.device) -> OffloadStore:
    try:
        place = Place.parse(to)
    except ValueError:
        place = Place("none")
    if place.kind == "none":
        raise ValueError(f"unknown swap={to!r}: expected 'host' (CUDA) or 'disk:FOLDER' (CPU)")
    if place.kind == "host" and device.type != "cuda":
        raise ValueError(
            f"swap='host' moves activations from a CUDA device to the host, but this model is on {device}; "
            "use swap='disk:FOLDER'"
        )
    if place.kind == "disk" and device.type != "cpu":
        raise ValueError(
            f"swap={to!r} is for models on the CPU, but this model is on {device}; use swap='host'"
        )
    return (
        HostStore("activations", pinned=True)
        if place.kind == "host"
        else DiskStore(place.folder, "activations")
    )


def map_blocks_from(threshold_bytes: int) -> None:
    """Make glibc allocate each block of at least `threshold_bytes` bytes with its own `mmap`.

    The threshold is limited to the range from 128 KiB to 32 MiB.  The call has no effect with other C libraries.

    By default, glibc raises the threshold when mapped blocks are freed, and then allocates large blocks in its
    heap.  Aligned blocks then leave gaps that are too small for the next block of the same size, so swapping would
    save no memory.  A mapped block is returned to the kernel when it is freed, but the kernel must clear the pages
    of each new block.  See `man mallopt`.
    """
    if sys.platform != "linux":
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        bounded = min(max(threshold_bytes, _LEAST_MMAP_THRESHOLD), _MOST_MMAP_THRESHOLD)
        set_option(_M_MMAP_THRESHOLD, bounded)


class _Saved:
    """The memory of one or more saved tensors: in `original` until it is written, then in `record`."""

    def __init__(self, tensor: Tensor, number: int, block: int, record: Record) -> None:
        storage = tensor.untyped_storage()
        self.number, self.block, self.record = number, block, record
        self.nbytes = storage.nbytes()
        self.memory = weakref.ref(storage)
        self.version = tensor._version
        self.original: Tensor | None = tensor.detach()  # shares the version counter; None once it is written
        self.writing: Transfer | None = None
        self.fetched: tuple[Tensor, Transfer] | None = None
        self.changed = False
        self.unread = 0
        """The number of saved tensors that the backward pass has not requested yet."""


class _View:
    """The placeholder for a saved tensor in the autograd graph."""

    def __init__(self, saved: _Saved, tensor: Tensor) -> None:
        self.saved = saved
        self.dtype, self.device = tensor.dtype, tensor.device
        self.place = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self.read = False
        saved.unread += 1

    def done(self) -> None:
        """Mark this view as read or unreachable, and free the fetched memory when all views are marked."""
        if not self.read:
            self.read = True
            self.saved.unread -= 1
            if self.saved.unread == 0:
                self.saved.fetched = None

    def __del__(self) -> None:
        self.done()


class Swap:
    """Swaps the activations of one model; as a context manager, calls `close` on exit.

    Create a swap with `swap_activations`.  `written_bytes` and `read_bytes` are the numbers of bytes that were
    swapped out and in.
    """

    def __init__(
        self,
        model: nn.Module,
        store: OffloadStore,
        passes: Sequence[nn.Module],
        threshold_bytes: int,
        behind_bytes: int,
        ahead_bytes: int,
    ) -> None:
        self.model = model
        self.written_bytes = self.read_bytes = 0
        self._store, self._device = store, device_of(model)
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
        blocks: list[tuple[nn.Module, Wrapper]] = [
            (block, self._run_block) for _, block in blocks_of(model) if block is not model
        ]
        self._wrappers: list[tuple[nn.Module, Wrapper]] = [*blocks, *((each, self) for each in passes)]
        for module, wrapper in self._wrappers:
            wrap_calls(module, wrapper)

    def close(self) -> None:
        """Stop swapping and free the store; later backward passes over existing graphs raise an error."""
        if self._closed:
            return
        self._closed = True
        for module, wrapper in self._wrappers:
            unwrap_calls(module, wrapper)
        self._waiting.clear()
        self._store.close()
        if not self._store.in_memory:
            map_blocks_from(_MOST_MMAP_THRESHOLD)  # the value that glibc reaches in a training run

    def __enter__(self) -> Swap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the model's forward pass with the saved-tensor hooks."""
        if not torch.is_grad_enabled() or measuring():
            return call(*args, **kwargs)
        with self.hooks(args, kwargs):
            return call(*args, **kwargs)

    def _run_block(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if torch.is_grad_enabled() and not recomputing():
            self.enter_block()
        return call(*args, **kwargs)

    def hooks(self, *living: Any) -> AbstractContextManager[Any]:
        """Return the saved-tensor hooks for one forward pass.

        Tensors that share memory with `living` are not swapped.
        """
        tensors = [one for one in tree_leaves(living) if isinstance(one, Tensor)]
        tensors += [*self.model.parameters(), *self.model.buffers()]
        self._stays = {t.untyped_storage()._cdata for t in tensors if t.layout is torch.strided}
        with self._lock:
            oldest = min((saved.block for saved in self._in_order.values()), default=self._block)
            self._first_of_block = {b: n for b, n in self._first_of_block.items() if b >= oldest - 1}
            self.enter_block()
        return saved_tensors_hooks(self.pack, self.unpack)

    def enter_block(self) -> None:
        """Assign all tensors that are saved from now on to the next block."""
        self._block += 1
        self._first_of_block[self._block] = self._count

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Return the object for autograd to save: a placeholder if `tensor` is swapped, and otherwise an alias."""
        if not self._is_swapped(tensor):
            return tensor.detach()  # an output would keep its graph alive
        with self._lock:
            self._free_written(self._behind)
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

    def _is_swapped(self, tensor: Tensor) -> bool:
        if (
            type(tensor) is not Tensor
            or tensor.layout is not torch.strided
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return False
        if tensor.device.type != self._device.type or tensor.untyped_storage()._cdata in self._stays:
            return False
        root = tensor if tensor._base is None else tensor._base
        if root.is_leaf and root.requires_grad:  # a parameter whose data was replaced during the pass
            return False
        return tensor.untyped_storage().nbytes() >= max(self._threshold, 1)

    def _save(self, tensor: Tensor) -> _Saved:
        (record,) = self._store.allocate([tensor.untyped_storage().nbytes()])
        saved = _Saved(tensor, self._count, self._block, record)
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        saved.writing = self._store.write(record, whole)
        self._in_order[self._count] = saved
        self._count += 1
        self._waiting.append(saved)
        self._waiting_bytes += saved.nbytes
        self.written_bytes += saved.nbytes
        return saved

    def _free_written(self, allowed: int) -> None:
        """Free memory that has been written, and wait until at most `allowed` bytes are unwritten."""
        while self._waiting:
            saved = self._waiting[0]
            assert saved.writing is not None
            if self._waiting_bytes <= allowed and not saved.writing.done:
                return
            saved.writing.synchronize()
            self._waiting.popleft()
            self._waiting_bytes -= saved.nbytes
            assert saved.original is not None
            # This runs in the computing thread, between operations: an in-place change increases the version counter
            # only at the end of the operation.
            saved.changed = saved.original._version != saved.version
            saved.original = saved.writing = None

    def unpack(self, packed: Tensor | _View) -> Tensor:
        """Return the saved tensor for `packed`, a result of `pack`."""
        if isinstance(packed, Tensor):
            return packed
        if self._closed:
            raise OffloadError("this Swap is closed; run backward passes before calling close()")
        saved = packed.saved
        with self._lock:
            self._free_written(self._behind)
            self._prefetch(saved)
            data = self._data(saved)
        tensor = torch.empty(0, dtype=packed.dtype, device=packed.device)
        tensor.set_(data.untyped_storage(), *packed.place)
        packed.done()
        if saved.unread == 0:  # second pass over a retained graph: all views are marked
            saved.fetched = None
        return tensor

    def _data(self, saved: _Saved) -> Tensor:
        original = saved.original
        if saved.changed if original is None else original._version != saved.version:
            raise RuntimeError(
                "a tensor needed by the backward pass was modified in place after it was saved; use an out-of-place "
                "operation (PyTorch raises the same error without swapping)"
            )
        if original is not None:
            return original
        data, reading = self._fetch(saved)
        reading.wait()
        return data

    def _fetch(self, saved: _Saved) -> tuple[Tensor, Transfer]:
        """Start reading `saved` if necessary; return the destination memory and the transfer."""
        if saved.fetched is None:
            memory = self._store.empty(saved.nbytes, self._device)
            saved.fetched = memory, self._store.read(saved.record, memory)
            self.read_bytes += saved.nbytes
        return saved.fetched

    def _prefetch(self, wanted: _Saved) -> None:
        """Start reading `wanted`, then the tensors saved before it in its block and in the previous block."""
        if wanted.original is None:
            self._fetch(wanted)
        first = self._first_of_block.get(wanted.block - 1, self._first_of_block.get(wanted.block, 0))
        ahead = 0
        for number in range(wanted.number - 1, first - 1, -1):
            saved = self._in_order.get(number)
            if saved is not None and saved.unread:
                ahead += saved.nbytes
                if ahead > self._ahead:
                    return
                if saved.original is None:
                    self._fetch(saved)
