"""All-reduce fp32 tensors in fp16, like the compression in Horovod's tutorials."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm.communicator import Array, Communicator, ReduceName
from farandole.comm.compression import Compression, Compressor


class HalfCommunicator(Communicator):
    """A `Communicator` that all-reduces fp32 tensors in fp16; its other methods are unchanged.

    The conversion to fp16 keeps 11 of the 24 significand bits and overflows above 65504.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        # a bucket is reduced in every step, so its fp16 copy is kept
        self._halves: dict[tuple[int, int], Tensor] = {}

    def all_reduce(
        self,
        tensor: Array,
        op: ReduceName = "sum",
        *,
        output: Array | None = None,
        compression: Compressor | Compression | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        """All-reduce `tensor`; an fp32 tensor is communicated in fp16.

        If `output` or `compression` is given, an fp32 tensor is not converted.
        """
        if (
            not isinstance(tensor, Tensor)
            or tensor.dtype != torch.float32
            or compression is not None
            or output is not None
        ):
            return super().all_reduce(tensor, op, output=output, compression=compression, async_op=async_op)
        half = self._half_of(tensor)
        half.copy_(tensor)
        work = super().all_reduce(half, op, async_op=async_op)
        if work is None:
            tensor.copy_(half)
            return None
        return _Widened(work, half, tensor)

    def _half_of(self, tensor: Tensor) -> Tensor:
        key = tensor.data_ptr(), tensor.numel()
        if key not in self._halves:
            self._halves[key] = self.empty(*tensor.shape, dtype=torch.float16, device=tensor.device)
        return self._halves[key]


class _Widened(dist.Work):
    """A `Work` handle whose `wait` copies the fp16 result into the fp32 tensor."""

    def __init__(self, work: dist.Work, half: Tensor, tensor: Tensor) -> None:
        super().__init__()
        self._work, self._half, self._tensor = work, half, tensor

    def wait(self, timeout: timedelta | None = None) -> bool:
        arguments: list[Any] = [] if timeout is None else [timeout]
        self._work.wait(*arguments)
        self._tensor.copy_(self._half)
        return True
