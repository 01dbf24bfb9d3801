"""Gradient compression: what is communicated is narrower than what is computed with."""

from __future__ import annotations

import torch
from torch import Tensor


class Compressor:
    """Two functions: `compress` returns a tensor and the context that `decompress` needs."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """Return the tensor to communicate and the context of `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        """Return the tensor in its original type."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Communicate tensors unchanged."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        """Return the tensor."""
        return tensor


class _Narrower(Compressor):
    """Communicate floating-point tensors in a type of 16 bits, and other tensors unchanged."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """Return the tensor in 16 bits."""
        if not tensor.dtype.is_floating_point or tensor.dtype == cls.dtype:
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        """Return the tensor in its original type."""
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_Narrower):
    """Communicate in float16."""

    dtype = torch.float16


class BF16Compressor(_Narrower):
    """Communicate in bfloat16, which has the range of float32 (not in Horovod)."""

    dtype = torch.bfloat16


class Compression:
    """The compressors, by the names of Horovod's `Compression`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
