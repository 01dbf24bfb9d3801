"""Gradient compression: communicate gradients in a 16-bit data type."""

from __future__ import annotations

import torch
from torch import Tensor


class Compressor:
    """The base class of compressors."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """Return the tensor to communicate, and the context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        """Return the tensor in its original data type."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Communicates tensors unchanged."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        """Return the tensor."""
        return tensor


class _CastCompressor(Compressor):
    """Casts floating-point tensors to a 16-bit data type, and passes other tensors through unchanged."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """Cast the tensor to the 16-bit data type.  Return the result and the original data type."""
        if not tensor.dtype.is_floating_point or tensor.dtype == cls.dtype:
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        """Return the tensor in its original data type."""
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Communicates in float16."""

    dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Communicates in bfloat16, which has float32's range.  Horovod has no counterpart."""

    dtype = torch.bfloat16


class Compression:
    """The compressors, under Horovod's names."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
