"""Track the memory of live tensors by kind, record its peak, and enforce a limit.

    with DeviceMemory(12 << 30, torch.device("cpu")) as memory:
        memory.watch(model)
        engine = farandole.parallelize(model, plan, initialize=fill)
        for step in range(steps):
            memory.step = step
            ...
            memory.in_use, memory.peak

The limit applies from the first allocation.  Code that allocates memory declares the kind of memory with `memory_tag`.
A tag costs almost nothing if no tracker is active:

    with memory_tag("weights", parameters):
        buffer = torch.empty(length)
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from farandole._troubleshooting import Documented
from farandole.data.wording import size
from farandole.memory.blocks import blocks_of
from farandole.memory.dry_run import flops_of
from farandole.models.chunks import repetitions

MAPPED_FROM_BYTES = 32 << 20
"""glibc allocates blocks of at least this size with `mmap`, and unmaps them when they are freed.

See `mallopt(3)`, `M_MMAP_THRESHOLD`.
"""

Kind = Literal["weights", "gradients", "masters and states", "activations"]


@dataclass(frozen=True)
class MemoryTag:
    """The kind of an allocation, the parameters it belongs to (if known), and the number of ranks that share it."""

    kind: Kind
    parameters: Sequence[nn.Parameter] = ()
    ranks: int = 1


_ACTIVATIONS = MemoryTag("activations")

_current: ContextVar[MemoryTag] = ContextVar("memory_tag")


@contextmanager
def memory_tag(kind: Kind, parameters: Sequence[nn.Parameter] = (), *, ranks: int = 1) -> Iterator[None]:
    """Tag the memory that this thread allocates in the context; untagged memory counts as activations."""
    token = _current.set(MemoryTag(kind, parameters, ranks))
    try:
        yield
    finally:
        _current.reset(token)


def by_kind(count: Mapping[Kind, int]) -> str:
    """Return text such as `weights 2.3 GiB, gradients 4.6 GiB`, omitting kinds with zero bytes."""
    return ", ".join(f"{kind} {size(count[kind])}" for kind in get_args(Kind) if count.get(kind))


class OutOfDeviceMemory(Documented, RuntimeError):
    """Raised when an allocation exceeds the memory limit of the device.

    `requested` is the size in bytes, if known, and `tag` describes the requested memory.  `in_use` is the number of
    bytes of each kind before the allocation.  `place` names the block and the phase of the step.  `step` is the step
    number (None before the first step).
    """

    _section = "out-of-device-memory"

    def __init__(
        self,
        limit: int,
        requested: int | None,
        in_use: dict[Kind, int],
        tag: str,
        place: str,
        step: int | None,
    ) -> None:
        self.limit, self.requested, self.in_use = limit, requested, in_use
        self.tag, self.place, self.step = tag, place, step
        when = "before the first step" if step is None else f"in step {step}"
        more = "more memory" if requested is None else size(requested)
        held = by_kind(in_use) or "nothing"
        super().__init__(
            f"out of device memory {when}{place}: {more} requested for {tag}, but only "
            f"{size(max(0, limit - sum(in_use.values())))} of {size(limit)} free; in use: {held}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.limit, self.requested, self.in_use, self.tag, self.place, self.step)


class DeviceMemory:
    """Limits this process to `limit_bytes` of memory on `device` within a context, and counts the memory by kind.

    The memory of a tensor and its views is counted once, from the first operation that creates or uses the tensor until
    the memory is freed.  Memory shared by several ranks is divided equally among them.  Memory that belongs to no
    tensor, such as library workspaces and temporary memory within an operation, is not counted.  On a CUDA device,
    torch's allocator enforces the limit, which then includes workspaces and temporary memory.

    Args:
        limit_bytes: the limit, or None to count without a limit.

    Raises:
        ValueError: if the limit is below one byte.
    """

    def __init__(self, limit_bytes: int | None, device: torch.device) -> None:
        if limit_bytes is not None and limit_bytes < 1:
            raise ValueError(f"limit_bytes={limit_bytes}: expected at least 1")
        if str(device) == "cuda":  # torch's limit needs a device index
            device = torch.device("cuda", torch.cuda.current_device())
        self.limit, self.device = limit_bytes, device
        self.step: int | None = None
        self.peak = 0
        self._in_use: Counter[Kind] = Counter()
        self._model: nn.Module | None = None
        self._place = ""
        self._updating = False
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, MemoryTag]] = {}
        self._freed: deque[int] = deque()  # keys to subtract; any thread may free memory
        self._mode = _TensorMode(self._see, self._refused)
        self._hooks: list[Any] = []

    @property
    def in_use(self) -> Counter[Kind]:
        """The number of bytes in use, by kind."""
        while self._freed:
            _, nbytes, tag = self._known.pop(self._freed.popleft())
            self._in_use[tag.kind] -= nbytes // tag.ranks
        return self._in_use

    @property
    def total(self) -> int:
        """The total number of bytes in use."""
        return self.in_use.total()

    def watch(self, model: nn.Module) -> None:
        """Count the existing tensors of `model` as weights, and use the names of its blocks and parameters in errors.

        Call this method before the model is parallelized.
        """
        self._model = model
        for tensor in (*model.parameters(), *model.buffers()):
            with memory_tag("weights", [tensor] if isinstance(tensor, nn.Parameter) else []):
                self._see(tensor)
        for name, block in blocks_of(model):
            self._hooks += [
                block.register_forward_pre_hook(self._enter(f", in the forward pass of block {name}")),
                block.register_forward_hook(self._leave(name)),
            ]

    def __enter__(self) -> DeviceMemory:
        if self.device.type == "cuda" and self.limit is not None:
            whole = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.limit / whole), self.device)
        self._hooks += [
            register_optimizer_step_pre_hook(lambda *_: self._update(True)),
            register_optimizer_step_post_hook(lambda *_: self._update(False)),
        ]
        self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, trace)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.device.type == "cuda" and self.limit is not None:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def _see(self, tensor: Tensor) -> None:
        """Count the memory of `tensor` if its storage is new or has been resized."""
        storage = tensor.untyped_storage()
        if storage.device.type != self.device.type:
            return
        in_use, key, nbytes = self.in_use, storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is not None and known[1] == nbytes:
            return
        tag = self._tag() if known is None else known[2]
        more = nbytes // tag.ranks - (0 if known is None else known[1] // tag.ranks)
        limit = None if self.device.type == "cuda" else self.limit
        if limit is not None and in_use.total() + more > limit:
            raise self._error(more, tag, limit)
        reference = weakref.ref(storage, self._note_freed(key)) if known is None else known[0]
        self._known[key] = (reference, nbytes, tag)
        in_use[tag.kind] += more
        self.peak = max(self.peak, in_use.total())

    def _refused(self) -> OutOfDeviceMemory | None:
        """Return the error for a failed allocation on a CUDA device, or None if there is no limit."""
        return None if self.limit is None else self._error(None, self._tag(), self.limit)

    def _note_freed(self, key: int) -> Callable[[Any], None]:
        return lambda _: self._freed.append(key)

    def _tag(self) -> MemoryTag:
        tag = _current.get(_ACTIVATIONS)
        if self._updating and tag.kind == "activations":
            return MemoryTag("masters and states")
        return tag

    def _update(self, begins: bool) -> None:
        self._updating = begins
        self._place = ", in the optimizer step" if begins else ""

    def _enter(self, place: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._place = place

        return enter

    def _leave(self, name: str) -> Callable[..., None]:
        behind = self._enter(f", in the backward pass of block {name}")

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            self._place = ""
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(behind)  # the gradient is complete: the block's backward pass starts

        return leave

    def _error(self, requested: int | None, tag: MemoryTag, limit: int) -> OutOfDeviceMemory:
        wanted = tag.kind + self._names(tag.parameters)
        return OutOfDeviceMemory(limit, requested, dict(self.in_use), wanted, self._place, self.step)

    def _names(self, parameters: Sequence[nn.Parameter]) -> str:
        """Return text such as ` of 3.attention.qkv.weight` or ` of 0.weight to 5.weight`."""
        if self._model is None or not parameters:
            return ""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        found = [names[id(parameter)] for parameter in parameters if id(parameter) in names]
        ends = found if len(found) < 3 else [found[0], found[-1]]
        return f" of {(' and ' if len(found) < 3 else ' to ').join(ends)}" if ends else ""


class _TensorMode(TorchDispatchMode):
    """Calls `see` with the inputs of each operation before it runs, and with its outputs afterwards."""

    def __init__(
        self, see: Callable[[Tensor], None], refused: Callable[[], OutOfDeviceMemory | None]
    ) -> None:
        super().__init__()
        self._see, self._refused = see, refused

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._show((args, kwargs))
        try:
            result = function(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            refusal = self._refused()
            if refusal is None:
                raise
            raise refusal from error
        self._show(result)
        return result

    def _show(self, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor) and value.layout is torch.strided:
                self._see(value)


class MemoryTracker(TorchDispatchMode):
    """Counts the memory of real or fake tensors, and the work of the operations that create them.

    The memory of the tensors in `outside` is not counted.  `now` and `peak` are in bytes; for `flops` and `moved`,
    see `planner.Trace`.  Each change appends a pair to `history`: the bytes in the heap and the bytes in
    memory-mapped blocks.
    """

    def __init__(self, outside: Iterable[Any]) -> None:
        super().__init__()
        self.now = self.flops = self.moved = 0
        self._mapped = 0
        self.history: list[tuple[int, int]] = []
        self._live: dict[int, int] = {}  # bytes of each storage, by storage number
        self._count = 0
        self._seen: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._outside = {tensor.untyped_storage()._cdata for tensor in outside if isinstance(tensor, Tensor)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        written = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
        fresh = False
        for tensor in written:
            fresh |= self._add(tensor)
        times = repetitions()
        flops = flops_of(func.overloadpacket, args, kwargs, output)
        self.flops += times * flops
        if not flops and (fresh or func._schema.is_mutable):  # otherwise the operation creates a view
            read = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            self.moved += times * sum(one.numel() * one.element_size() for one in (*read, *written))
        return output

    def _add(self, tensor: Tensor) -> bool:
        """Count the storage of `tensor`; return whether the storage is new."""
        if tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._outside:
            return False
        known = self._seen.get(key)
        if known is not None and known[0]() is not None:
            return False
        nbytes = storage.nbytes()
        if nbytes == 0:
            return True
        self._count = number = self._count + 1
        self._live[number] = nbytes
        self._count_bytes(nbytes)
        self._seen[key] = weakref.ref(storage, lambda _: self._free(number)), number
        return True

    def _free(self, number: int) -> None:
        self._count_bytes(-self._live.pop(number))

    def _count_bytes(self, more: int) -> None:
        self.now += more
        if abs(more) >= MAPPED_FROM_BYTES:
            self._mapped += more
        self.history.append((self.now - self._mapped, self._mapped))

    @property
    def peak(self) -> int:
        """The largest number of bytes that were live at the same time."""
        return max((sum(both) for both in self.history), default=0)

    @property
    def resident_peak(self) -> int:
        """The peak of the heap, which glibc does not shrink, plus the peak of the mapped blocks, in bytes."""
        return sum(max(sizes) for sizes in zip(*self.history, strict=True)) if self.history else 0

    def live(self, least_bytes: int = 0, *, without: Sequence[Tensor] = ()) -> dict[int, int]:
        """Return the size in bytes of each live storage, keyed by a unique number.

        Storages smaller than `least_bytes` and storages of the tensors in `without` are omitted.
        """
        keys = {tensor.untyped_storage()._cdata for tensor in without}
        left_out = {self._seen[key][1] for key in keys if key in self._seen}
        return {n: size for n, size in self._live.items() if size >= least_bytes and n not in left_out}
