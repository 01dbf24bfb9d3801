"""Operations among the ranks on one host; tensors are passed to the C core as addresses and counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Array, byref, c_int, c_void_p
from functools import partial
from typing import Any

import torch
from torch import Tensor

from farandole.comm.core import GroupCore, Parts
from farandole.comm.dense import counts_of, pointers_to
from farandole.comm.dtypes import TYPES
from farandole.comm.host_group import HostGroup
from farandole.native import Call as CallRecord

Native = tuple[str, tuple[Any, ...]]
"""The name of a C function in native/core.h, and its arguments except the group (first) and the flags (last)."""


class NativeCore(GroupCore):
    """Runs operations among the ranks of a group on this host; ranks are numbered within this host."""

    shares_memory = True

    def __init__(self, host: HostGroup) -> None:
        super().__init__(host)
        self.rank, self.size = host.rank, host.size
        self._library = host.core

    def receive_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in this process's arena, or in private memory if the arena is full."""
        try:
            return self.host.allocate(shape, dtype, 0)
        except OSError:
            return super().receive_buffer(shape, dtype)

    def allocate_shared(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> Tensor:
        """Return a tensor of zeros in memory shared by all ranks; every rank must pass the same arguments."""
        return self.host.allocate_shared(shape, dtype, flags)

    # ---- collectives ----

    def all_reduce(self, output: Tensor, input: Tensor, reduction: int, flags: int) -> None:
        """Reduce `input` over all ranks into `output`."""
        self._run(_all_reduce(output, input, reduction), flags)

    def reduce(self, output: Tensor | None, input: Tensor, reduction: int, root: int, flags: int) -> None:
        """Reduce `input` over all ranks into `output` on rank `root`."""
        if output is not None and output is not input:
            output.copy_(input.view(output.shape))
            input = output
        self._run(_reduce(output, input, reduction, root), flags)

    def reduce_scatter(self, output: Tensor, inputs: Parts, reduction: int, flags: int) -> None:
        """Reduce `inputs` over all ranks and store this rank's part in `output`."""
        self._run(_reduce_scatter(output, inputs, reduction), flags)

    def all_gather(self, outputs: Parts, input: Tensor, flags: int) -> None:
        """Gather every rank's `input` into `outputs`."""
        self._run(_all_gather(outputs, input), flags)

    def broadcast(self, output: Tensor | None, input: Tensor | None, root: int, flags: int) -> None:
        """Copy `input` from rank `root` to `output` on the other ranks."""
        self._run(_broadcast(output, input, root), flags)

    def gather(
        self, outputs: Sequence[Tensor], input: Tensor, root: int, counts: Sequence[int] | None, flags: int
    ) -> None:
        """Gather every rank's `input` into `outputs` on rank `root`."""
        if counts is None:
            arguments = input.data_ptr(), pointers_to(outputs), input.numel(), TYPES[input.dtype], root
            self._run(("frd_gather", arguments), flags)
        else:
            nothing = input.new_empty(0)
            sources = [input if rank == root else nothing for rank in range(self.size)]
            self.all_to_all(outputs or [nothing] * self.size, sources, flags)

    def scatter(
        self, output: Tensor, inputs: Sequence[Tensor], root: int, counts: Sequence[int] | None, flags: int
    ) -> None:
        """Send `inputs[r]` from rank `root` to `output` on rank r."""
        if counts is None:
            arguments = pointers_to(inputs), output.data_ptr(), output.numel(), TYPES[output.dtype], root
            self._run(("frd_scatter", arguments), flags)
        else:
            nothing = output.new_empty(0)
            targets = [output if rank == root else nothing for rank in range(self.size)]
            self.all_to_all(targets, inputs or [nothing] * self.size, flags)

    def all_to_all(self, outputs: Parts, inputs: Parts, flags: int) -> None:
        """Send part j of `inputs` to rank j, and receive part i of `outputs` from rank i."""
        self._run(_all_to_all(outputs, inputs, self.size), flags)

    def scan(self, output: Tensor, input: Tensor, reduction: int, exclusive: bool, flags: int) -> None:
        """Reduce the inputs of ranks 0 to `rank` into `output`; if `exclusive`, exclude this rank's input."""
        self._run(_scan(output, input, reduction, exclusive), flags)

    def barrier(self, flags: int) -> None:
        """Block until every rank has called this method."""
        self._run(("frd_barrier", ()), flags)

    def agree(self, call: CallRecord, flags: int) -> None:
        """Check that all ranks on this host make the same call."""
        self.check(self._library.frd_declare(self.host.handle, byref(call), flags))
        self._library.frd_undeclare(self.host.handle)

    def _run(self, native: Native, flags: int) -> None:
        name, arguments = native
        self.check(getattr(self._library, name)(self.host.handle, *arguments, flags))

    # ---- reusable calls ----

    def prepare(self, operation: str, *arguments: Any) -> Callable[[int], Any]:
        """Return a callable that takes `flags` and runs the operation with `arguments` on each call.

        If possible, the arguments are converted for the C core only once.
        """
        native = self._native(operation, arguments)
        if native is None:
            return super().prepare(operation, *arguments)
        name, values = native
        # a new function object without argument types, so ctypes does not convert arguments
        function = self._library[name]
        kinds = getattr(self._library, name).argtypes[1:-1]
        converted = [
            value if isinstance(value, Array) or kind is c_int else kind(value)
            for kind, value in zip(kinds, values, strict=True)
        ]
        return partial(function, c_void_p(self.host.handle), *converted)

    def _native(self, operation: str, arguments: tuple[Any, ...]) -> Native | None:
        """Return the C call for an operation, or None if no single C call runs the operation."""
        match operation, arguments:
            case "barrier", _:
                return "frd_barrier", ()
            case "reduce", (output, input, *_) if output is not None and output is not input:
                return None
            case "scan", _:
                return _scan(*arguments)
            case "all_reduce", _:
                return _all_reduce(*arguments)
            case "reduce", _:
                return _reduce(*arguments)
            case "reduce_scatter", _:
                return _reduce_scatter(*arguments)
            case "all_gather", _:
                return _all_gather(*arguments)
            case "broadcast", _:
                return _broadcast(*arguments)
            case "all_to_all", _:
                outputs, inputs = arguments
                return _all_to_all(outputs, inputs, self.size)
        return None


def _all_reduce(output: Tensor, input: Tensor, reduction: int) -> Native:
    constants = output.numel(), TYPES[output.dtype], reduction
    if output is input:
        return "frd_all_reduce", (output.data_ptr(), *constants)
    return "frd_all_reduce_to", (input.data_ptr(), output.data_ptr(), *constants)


def _scan(output: Tensor, input: Tensor, reduction: int, exclusive: bool) -> Native:
    constants = input.numel(), TYPES[input.dtype], reduction, int(exclusive)
    return "frd_scan", (input.data_ptr(), output.data_ptr(), *constants)


def _reduce(output: Tensor | None, input: Tensor, reduction: int, root: int) -> Native:
    return "frd_reduce", (input.data_ptr(), input.numel(), TYPES[input.dtype], reduction, root)


def _reduce_scatter(output: Tensor, inputs: Parts, reduction: int) -> Native:
    kind = TYPES[output.dtype]
    if len(inputs) == 1:
        arguments = inputs[0].data_ptr(), output.data_ptr(), output.numel(), kind, reduction
        return "frd_reduce_scatter_even", arguments
    return "frd_reduce_scatter", (pointers_to(inputs), counts_of(inputs), output.data_ptr(), kind, reduction)


def _all_gather(outputs: Parts, input: Tensor) -> Native:
    kind = TYPES[input.dtype]
    if len(outputs) == 1:
        return "frd_all_gather_even", (input.data_ptr(), outputs[0].data_ptr(), input.numel(), kind)
    return "frd_all_gather", (input.data_ptr(), pointers_to(outputs), counts_of(outputs), kind)


def _broadcast(output: Tensor | None, input: Tensor | None, root: int) -> Native:
    tensor = output if input is None else input
    assert tensor is not None
    return "frd_broadcast", (tensor.data_ptr(), tensor.numel(), TYPES[tensor.dtype], root)


def _all_to_all(outputs: Parts, inputs: Parts, size: int) -> Native:
    kind = TYPES[inputs[0].dtype]
    if len(inputs) == len(outputs) == 1 and inputs[0].numel() == outputs[0].numel():
        arguments = inputs[0].data_ptr(), outputs[0].data_ptr(), inputs[0].numel() // size, kind
        return "frd_all_to_all_even", arguments
    sources, targets = pointers_to(inputs), pointers_to(outputs)
    return "frd_all_to_all", (sources, counts_of(inputs), targets, counts_of(outputs), kind)
