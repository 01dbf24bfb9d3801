"""A limit to the memory of a device that holds from the first allocation on, and says what ran out and where.

    with DeviceMemory(12 << 30, torch.device("cpu")) as memory:
        memory.watch(model)
        engine = farandole.parallelize(model, plan, initialise=fill)
        for step in range(steps):
            memory.step = step
            ...
            memory.in_use, memory.peak

What is counted is the memory of every tensor on the device, once however many views of it there are, from the first
operation that makes or takes it until it is freed.  What several ranks have in common (`memory.purpose`) counts as this
rank's share.  Not seen is what no tensor holds, such as libraries' work space and what torch makes inside of one operation.
A CUDA device enforces the limit itself, with all that.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from farandole.data.wording import size
from farandole.memory.blocks import blocks_of
from farandole.memory.purpose import Kind, Purpose, current_purpose, taking


def by_kind(count: Mapping[Kind, int]) -> str:
    """`weights 2.3 GiB, gradients 4.6 GiB`; kinds of which there is nothing are left out."""
    return ", ".join(f"{kind} {size(count[kind])}" for kind in get_args(Kind) if count.get(kind))


class OutOfDeviceMemory(RuntimeError):
    """The device has less memory than was asked for.

    `requested` is the bytes, where they are known, `in_use` the bytes of each kind that there were before, `purpose` what
    more was wanted for, `place` the block and the part of a step in which it was, and `step` which one (None before the
    first).
    """

    def __init__(
        self,
        limit: int,
        requested: int | None,
        in_use: dict[Kind, int],
        purpose: str,
        place: str,
        step: int | None,
    ) -> None:
        self.limit, self.requested, self.in_use = limit, requested, in_use
        self.purpose, self.place, self.step = purpose, place, step
        when = "before the first step" if step is None else f"in step {step}"
        more = "more" if requested is None else size(requested)
        held = by_kind(in_use) or "nothing"
        super().__init__(
            f"out of device memory {when}{place}: {more} wanted for {purpose}, and of {size(limit)} there are "
            f"{size(max(0, limit - sum(in_use.values())))} left; in use: {held}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.limit, self.requested, self.in_use, self.purpose, self.place, self.step)


class DeviceMemory:
    """Has this process take no more than `limit_bytes` of `device` within it, and counts by kind what it takes.

    `limit_bytes` None counts only.  Raises ValueError for a limit that is no number of bytes.
    """

    def __init__(self, limit_bytes: int | None, device: torch.device) -> None:
        if limit_bytes is not None and limit_bytes < 1:
            raise ValueError(f"a device has at least one byte of memory, not {limit_bytes}")
        if str(device) == "cuda":  # torch's limit needs a number
            device = torch.device("cuda", torch.cuda.current_device())
        self.limit, self.device = limit_bytes, device
        self.step: int | None = None
        self.peak = 0
        self._in_use: Counter[Kind] = Counter()
        self._model: nn.Module | None = None
        self._place = ""
        self._updating = False
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, Purpose]] = {}
        self._freed: deque[int] = deque()  # keys of what is to be taken off; any thread may free something
        self._mode = _Seeing(self._see, self._refused)
        self._hooks: list[Any] = []

    @property
    def in_use(self) -> Counter[Kind]:
        """Bytes in use, by kind."""
        while self._freed:
            _, nbytes, purpose = self._known.pop(self._freed.popleft())
            self._in_use[purpose.kind] -= nbytes // purpose.ranks
        return self._in_use

    @property
    def total(self) -> int:
        """Bytes in use."""
        return self.in_use.total()

    def watch(self, model: nn.Module) -> None:
        """Name blocks and parameters of `model` in errors, and count what it has already as weights.

        Call it before the model is parallelized.
        """
        self._model = model
        for tensor in (*model.parameters(), *model.buffers()):
            with taking("weights", [tensor] if isinstance(tensor, nn.Parameter) else []):
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
        """Count the memory of `tensor`, if it is new or has another size than before."""
        storage = tensor.untyped_storage()
        if storage.device.type != self.device.type:
            return
        in_use, key, nbytes = self.in_use, storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is not None and known[1] == nbytes:
            return
        purpose = self._purpose() if known is None else known[2]
        more = nbytes // purpose.ranks - (0 if known is None else known[1] // purpose.ranks)
        limit = None if self.device.type == "cuda" else self.limit
        if limit is not None and in_use.total() + more > limit:
            raise self._error(more, purpose, limit)
        reference = weakref.ref(storage, self._note_freed(key)) if known is None else known[0]
        self._known[key] = (reference, nbytes, purpose)
        in_use[purpose.kind] += more
        self.peak = max(self.peak, in_use.total())

    def _refused(self) -> OutOfDeviceMemory | None:
        """What to say where a CUDA device has refused memory, if the limit was ours."""
        return None if self.limit is None else self._error(None, self._purpose(), self.limit)

    def _note_freed(self, key: int) -> Callable[[Any], None]:
        return lambda _: self._freed.append(key)

    def _purpose(self) -> Purpose:
        purpose = current_purpose()
        if self._updating and purpose.kind == "activations":
            return Purpose("masters and states")
        return purpose

    def _update(self, begins: bool) -> None:
        self._updating = begins
        self._place = ", in the update of the optimizer" if begins else ""

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
                    tensor.register_hook(behind)  # its gradient is there: the block's backward pass begins

        return leave

    def _error(self, requested: int | None, purpose: Purpose, limit: int) -> OutOfDeviceMemory:
        wanted = purpose.kind + self._names(purpose.parameters)
        return OutOfDeviceMemory(limit, requested, dict(self.in_use), wanted, self._place, self.step)

    def _names(self, parameters: Sequence[nn.Parameter]) -> str:
        """` of 3.attention.qkv.weight`, the first and the last where there are several."""
        if self._model is None or not parameters:
            return ""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        found = [names[id(parameter)] for parameter in parameters if id(parameter) in names]
        ends = found if len(found) < 3 else [found[0], found[-1]]
        return f" of {(' and ' if len(found) < 3 else ' to ').join(ends)}" if ends else ""


class _Seeing(TorchDispatchMode):
    """Shows `see` every tensor that an operation takes, before it runs, and makes.

    Where an operation fails for lack of memory, what `refused` returns is raised.
    """

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
