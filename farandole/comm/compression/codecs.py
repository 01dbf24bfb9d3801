"""Element-wise compression to 16-bit floats, or to 8-bit integers with one scale per block of values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from farandole import native
from farandole.comm.algorithms.steps import Reduce, Steps
from farandole.comm.compression.base import Compression, Compressor, Parameters
from farandole.comm.compression.direct import all_reduce
from farandole.comm.dtypes import TYPES
from farandole.comm.transport import Transport

_BLOCKS = range(16, 4096 + 1)


@dataclass(frozen=True)
class Cast(Compression):
    """Compresses fp32 values to 16-bit floats, which are half the size.

    bf16 has the same range as fp32.  fp16 has a smaller range, but three more bits of precision than bf16.

    Raises:
        ValueError: if `dtype` is not a 16-bit floating-point dtype.
    """

    dtype: torch.dtype = torch.bfloat16
    error_feedback: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"Cast: expected torch.bfloat16 or torch.float16, got {self.dtype}")

    def _compressor(self, count: int, parameters: Parameters, exact: int) -> Compressor:
        return CodecCompressor(self, Codec(self.dtype, _BLOCKS[0]), count, parameters, exact)


@dataclass(frozen=True)
class Int8(Compression):
    """Compresses fp32 values to 8-bit integers, which reduces the size to about a quarter.

    `block` is the number of values per block.  Each block has its own scale: its largest magnitude divided by 127.  If
    a block contains an infinity or a NaN, all values of the block are decoded as NaN.

    T. Dettmers: 8-bit approximations for parallelism in deep learning (2016).

    Raises:
        ValueError: if `block` is out of range.
    """

    block: int = 256

    def __post_init__(self) -> None:
        if self.block not in _BLOCKS:
            raise ValueError(
                f"Int8: expected block to be between {_BLOCKS[0]} and {_BLOCKS[-1]}, got {self.block}"
            )

    def _compressor(self, count: int, parameters: Parameters, exact: int) -> Compressor:
        return CodecCompressor(self, Codec(torch.int8, self.block), count, parameters, exact)


@dataclass(frozen=True)
class Codec:
    """Encodes fp32 values as messages, and decodes messages, with the C core (`native/codecs.inc`).

    Args:
        dtype: The dtype of the encoded values.
        block: The number of values per block; only int8 uses it.
    """

    dtype: torch.dtype
    block: int

    SCALE_BYTES: ClassVar[int] = 4

    def message(self, count: int) -> Tensor:
        """Return an uninitialized buffer for a message of `count` values."""
        scales = -(-count // self.block) * self.SCALE_BYTES if self.dtype is torch.int8 else 0
        return torch.empty(scales + count * self.dtype.itemsize, dtype=torch.uint8, device="cpu")

    def encode(
        self, x: Tensor, factor: float, residual: Tensor | None, decoded: Tensor | None = None
    ) -> Tensor:
        """Return a message that encodes `x * factor + residual`.

        The encoding error is stored in `residual`.  The values that the receiver will decode are stored in `decoded`.
        Both arguments may be None.
        """
        message = self.message(x.numel())
        status = native.library().frd_encode(
            TYPES[self.dtype],
            x.data_ptr(),
            factor,
            None if residual is None else residual.data_ptr(),
            message.data_ptr(),
            None if decoded is None else decoded.data_ptr(),
            x.numel(),
            self.block,
        )
        assert not status
        return message

    def decode(self, message: Tensor, x: Tensor, factor: float = 0.0) -> None:
        """Set `x` to `x * factor` plus the values decoded from `message`."""
        status = native.library().frd_decode(
            TYPES[self.dtype], message.data_ptr(), x.data_ptr(), factor, x.numel(), self.block
        )
        assert not status


class CodecCompressor(Compressor):
    """A compressor that encodes each value of the tensor with a `Codec`."""

    def __init__(
        self, compression: Compression, codec: Codec, count: int, parameters: Parameters, exact: int
    ) -> None:
        super().__init__(compression, count, parameters, exact)
        self._codec = codec

    def reduce(
        self, share: Tensor, transport: Transport, start: int, factor: float, exactly: Reduce
    ) -> Steps:
        """Replace `share` with the sum of `factor * share` over all hosts; see `direct.all_reduce`."""
        return all_reduce(transport, share, self._codec, self.residual(start, share), factor)

    def sent_fraction(self, hosts: int) -> float:
        """Return the ratio of the encoded size to the size in fp32."""
        block = self._codec.block
        return self._codec.message(block).nbytes / (block * torch.float32.itemsize)
