"""The table of operations: the tensors that each operation reads and writes, and argument validation.

Each row states which ranks read and write which tensors.  `Operation.call` uses this information to validate the
tensors, make them dense, pass complex numbers to reductions as pairs of real numbers, and copy results back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm.core import Core
from farandole.comm.dense import (
    as_bytes,
    as_real,
    copy_back,
    is_dense,
    overlaps,
    parts_of,
    readable,
    separate_elements,
    span_of,
    writable,
)
from farandole.comm.dtypes import REDUCTION_NAMES, REDUCTIONS, reducible
from farandole.comm.work import Call

Form = Literal["nothing", "one tensor", "parts"]
"""`parts` means one tensor per rank, or a single tensor with equal parts for all ranks."""
Who = Literal["all", "root", "others"]


@dataclass(frozen=True)
class Operation:
    """One row of the table of operations.

    The method of `Core` with this `name` runs the operation.  The arguments of the method are the outputs, the
    inputs, the constants and the flags.  `root` is the index of the root rank in the constants.
    """

    name: str
    reads: Form
    writes: Form
    readers: Who = "all"
    writers: Who = "all"
    root: int | None = None
    reduces: bool = False

    def call(self, core: Core, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *constants: Any) -> Call:
        """Validate the arguments, and return a callable that takes `flags` and runs the operation."""
        outputs, inputs = self._used(core, outputs, inputs, constants)
        constants = self._scaled(core, (*outputs, *inputs), constants)
        method, any_device = getattr(core, self.name), core.returns_work
        disturbed = self._disturbs_inputs(core, outputs, inputs)
        if not disturbed and all(is_dense(tensor, any_device) for tensor in (*outputs, *inputs)):
            return _without_grad(partial(method, *self._arranged(core, outputs, inputs), *constants))

        separate_elements(self.name, outputs)

        def copied(flags: int) -> Any:
            with torch.no_grad():
                sources = [readable(tensor, any_device) for tensor in inputs]
                copies = {id(tensor): source for tensor, source in zip(inputs, sources, strict=True)}
                if disturbed:
                    copies, sources = {}, [source.clone() for source in sources]
                targets = [
                    copies[id(output)] if id(output) in copies else writable(output, any_device)
                    for output in outputs
                ]
                work = method(*self._arranged(core, targets, sources), *constants, flags)
                if core.returns_work:
                    return CopyBack(work, outputs, targets)
                copy_back(outputs, targets)
                return None

        return copied

    def prepare(
        self, core: Core, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *constants: Any
    ) -> Call:
        """Return a callable that takes `flags` and runs the operation with the same tensors on each call.

        If possible, the addresses and counts are computed only once.
        """
        used = self._used(core, outputs, inputs, constants)
        dense = all(is_dense(tensor) for tensors in used for tensor in tensors)
        if core.returns_work or not dense or self._disturbs_inputs(core, *used):
            return self.call(core, outputs, inputs, *constants)
        return core.prepare(self.name, *self._arranged(core, *used), *constants)

    def _used(
        self, core: Core, outputs: Sequence[Tensor], inputs: Sequence[Tensor], constants: Sequence[Any]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the tensors that this rank writes and reads; raise ValueError unless their sizes match."""
        root = None
        if self.root is not None:
            root = existing_rank(self.name, "the root", constants[self.root], core.size)
            outputs = outputs if _takes_part(self.writers, core.rank, root) else []
            inputs = inputs if _takes_part(self.readers, core.rank, root) else []
        same_type(self.name, [*outputs, *inputs])
        has_parts = "parts" in (self.reads, self.writes)
        if has_parts and self.root is not None:
            self._check_rooted(core, outputs, inputs, root, constants[-1])
        elif has_parts or (outputs and inputs):
            self._check_counts(core, outputs, inputs)
        return outputs, inputs

    def _disturbs_inputs(self, core: Core, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
        """Return whether writing the outputs could overwrite inputs that have not yet been read."""
        addressable = (
            tensor.layout is torch.strided and is_dense(tensor, core.returns_work)
            for tensor in (*outputs, *inputs)
        )
        if not (outputs and inputs and all(addressable)):
            return False  # other tensors are copied
        reads = parts_of(inputs, core.size if self.reads == "parts" else 1)
        writes = parts_of(outputs, core.size if self.writes == "parts" else 1)
        if not overlaps(*span_of(reads), *span_of(writes)):
            return False
        # this rank's own part may occupy the same memory in the inputs and the outputs (in-place operation)
        own = core.rank if self.reads == "parts" else 0, core.rank if self.writes == "parts" else 0
        return any(
            overlaps(*read, *write) and not (read == write and (i, o) == own)
            for i, read in enumerate(reads)
            for o, write in enumerate(writes)
        )

    def _check_counts(self, core: Core, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        name, size, rank = self.name, core.size, core.rank
        sides = ("output", self.writes, outputs), ("input", self.reads, inputs)
        parts = [(what, tensors) for what, form, tensors in sides if form == "parts"]
        if any(len(tensors) != 1 for _, tensors in parts):
            for what, tensors in parts:
                same_count(name, f"the {what} list", len(tensors), "the group", size)
        own_output = outputs[rank if len(outputs) > 1 else 0].numel()
        own_input = inputs[rank if len(inputs) > 1 else 0].numel()
        if self.writes == "parts" == self.reads:
            if len(outputs) == len(inputs) == 1 and own_input % size:
                raise ValueError(
                    f"{name}: expected a multiple of {size} elements, got {own_input}; pass splits"
                )
            same_count(
                name, "this rank's part of the input", own_input, "this rank's part of the output", own_output
            )
        elif self.writes == "parts" and len(outputs) == 1:
            same_count(name, "the output", own_output, "all inputs together", own_input * size)
        elif self.reads == "parts" and len(inputs) == 1:
            same_count(name, "the input", own_input, "all outputs together", own_output * size)
        elif "parts" in (self.writes, self.reads):
            same_count(name, "this rank's input", own_input, "this rank's output", own_output)
        else:
            same_count(name, "the input", own_input, "the output", own_output)

    def _check_rooted(
        self,
        core: Core,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        root: int | None,
        counts: Sequence[int] | None,
    ) -> None:
        """Raise ValueError unless the tensors for a gather or a scatter have the correct sizes."""
        parts, (own,) = (outputs, inputs) if self.writes == "parts" else (inputs, outputs)
        if counts is not None:
            same_count(self.name, "the list of counts", len(counts), "the group", core.size)
            same_count(
                self.name, "this rank's tensor", own.numel(), "its entry in `counts`", counts[core.rank]
            )
        if core.rank != root:
            return
        same_count(
            self.name,
            f"the {'output' if parts is outputs else 'input'} list",
            len(parts),
            "the group",
            core.size,
        )
        for rank, part in enumerate(parts):
            expected = own.numel() if counts is None else counts[rank]
            if part.numel() != expected:
                hint = (
                    "for tensors of different lengths, pass `counts` on all ranks"
                    if counts is None
                    else "correct `counts`"
                )
                raise ValueError(
                    f"{self.name}: expected {expected} elements for rank {rank}, got {part.numel()}; {hint}"
                )

    def _scaled(self, core: Core, tensors: Sequence[Tensor], constants: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the constants; if tensors are passed as bytes, convert element counts to byte counts."""
        if core.returns_work and self in (GATHER, SCATTER) and constants[-1] is not None:
            width = tensors[0].element_size()
            return *constants[:-1], [count * width for count in constants[-1]]
        return constants

    def _arranged(self, core: Core, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Any]:
        """Return the tensor arguments for the `Core` method, viewed as real numbers or bytes if necessary."""
        if self.reduces or core.returns_work:  # Gloo does not support all types
            view = as_real if self.reduces else as_bytes
            # one view per tensor, so an in-place operation remains in place
            views = {id(tensor): view(tensor) for tensor in (*outputs, *inputs)}
            outputs, inputs = [views[id(t)] for t in outputs], [views[id(t)] for t in inputs]
        return [
            tensors if form == "parts" else tensors[0] if tensors else None
            for form, tensors in ((self.writes, outputs), (self.reads, inputs))
            if form != "nothing"
        ]


ALL_REDUCE = Operation("all_reduce", "one tensor", "one tensor", reduces=True)
REDUCE = Operation("reduce", "one tensor", "one tensor", writers="root", root=1, reduces=True)
REDUCE_SCATTER = Operation("reduce_scatter", "parts", "one tensor", reduces=True)
SCAN = Operation("scan", "one tensor", "one tensor", reduces=True)
ALL_GATHER = Operation("all_gather", "one tensor", "parts")
BROADCAST = Operation("broadcast", "one tensor", "one tensor", readers="root", writers="others", root=0)
GATHER = Operation("gather", "one tensor", "parts", writers="root", root=0)
SCATTER = Operation("scatter", "parts", "one tensor", readers="root", root=0)
ALL_TO_ALL = Operation("all_to_all", "parts", "parts")
BARRIER = Operation("barrier", "nothing", "nothing")


class CopyBack(dist.Work):
    """The work of a torch process group for an operation on temporary buffers.

    `wait` also copies the results to the user's tensors.
    """

    def __init__(self, work: dist.Work, tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        super().__init__()
        self._work, self._tensors, self._buffers = work, tensors, buffers

    def is_completed(self) -> bool:
        """Return whether the results are ready to be copied."""
        return self._work.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the user's tensors contain the results."""
        self._work.wait(*([] if timeout is None else [timeout]))
        with torch.no_grad():
            copy_back(self._tensors, self._buffers)
        return True


# ---- arguments ----


def reduction_number(op: Any, dtype: torch.dtype) -> int:
    """Return the C core's number for the reduction `op`, a name or a `ReduceOp`.

    Raises:
        ValueError: if `op` is unknown or does not support `dtype`.
    """
    if isinstance(op, str):
        number = REDUCTION_NAMES.index(op) if op in REDUCTION_NAMES else None
    else:
        number = REDUCTIONS.get(hash(op))
    if number is None:
        name = getattr(op, "op", op)  # printing the `ReduceOp` itself would show its address
        raise ValueError(f"expected the reduction to be one of {', '.join(REDUCTION_NAMES)}, got {name}")
    name = REDUCTION_NAMES[number]
    exists = name in ("sum", "avg") if dtype.is_complex else reducible(dtype, number)
    if not exists:
        raise ValueError(
            f"the reduction {name} does not support {dtype}; convert the tensor or use another reduction"
        )
    return number


def existing_rank(call: str, what: str, rank: int, size: int) -> int:
    """Return `rank`; raise ValueError if `rank` is not between 0 and `size` - 1."""
    if not 0 <= rank < size:
        raise ValueError(f"{call}: expected {what} to be between 0 and {size - 1}, got {rank}")
    return rank


def same_type(call: str, tensors: Sequence[Tensor]) -> None:
    """Raise ValueError unless all tensors have the same dtype."""
    for tensor in tensors[1:]:
        if tensor.dtype is not tensors[0].dtype:
            raise ValueError(
                f"{call}: expected tensors of one dtype, got {tensors[0].dtype} and {tensor.dtype}; convert one of them"
            )


def same_count(call: str, what: str, found: int, which: str, expected: int) -> None:
    """Raise ValueError unless `found` equals `expected`."""
    if found != expected:
        raise ValueError(f"{call}: expected equal counts, got {found} for {what} and {expected} for {which}")


def split_rows(
    tensor: Tensor | list[Tensor], splits: Sequence[int] | None, ranks: int, what: str
) -> list[Tensor]:
    """Split a tensor along dimension 0 into one part per rank.

    Args:
        tensor: The tensor, or a list of the parts, which is returned unchanged.
        splits: The number of rows for each rank; if None or empty, all parts have the same number of rows.
        ranks: The number of ranks.
        what: The name of the tensor in error messages.

    Raises:
        ValueError: if the splits do not match the number of rows in the tensor, or if splits are given for a list.
    """
    if isinstance(tensor, list):
        if splits:
            raise ValueError(f"all_to_all: expected a tensor with {what} splits, got a list; omit the splits")
        return tensor
    tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
    rows = tensor.shape[0]
    if not splits:
        if rows % ranks:
            raise ValueError(
                f"all_to_all: expected a multiple of {ranks} rows in the {what}, got {rows}; pass splits"
            )
        splits = [rows // ranks] * ranks
    if len(splits) != ranks or sum(splits) != rows or min(splits) < 0:
        raise ValueError(
            f"all_to_all: expected {ranks} non-negative {what} splits that add up to the {rows} rows of the "
            f"{what}, got {list(splits)}"
        )
    return list(tensor.split(list(splits)))


def exchanged(
    output: Tensor | list[Tensor],
    input: Tensor | list[Tensor],
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    ranks: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the output parts and the input parts of an all-to-all; tensors are split along dimension 0.

    If no splits are given and both sides are dense tensors, return the whole tensors instead.
    """
    outputs = split_rows(output, output_splits, ranks, "output")
    inputs = split_rows(input, input_splits, ranks, "input")
    whole = [each for each in (output, input) if isinstance(each, Tensor) and is_dense(each)]
    if len(whole) == 2 and not output_splits and not input_splits:
        return whole[:1], whole[1:]
    return outputs, inputs


def _takes_part(who: Who, rank: int, root: int) -> bool:
    return who == "all" or (rank == root) == (who == "root")


def _without_grad(call: Call) -> Call:
    def run(flags: int) -> Any:
        with torch.no_grad():
            return call(flags)

    return run
