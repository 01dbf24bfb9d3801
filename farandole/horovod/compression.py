"""Gradient compression: communicate gradients in a 16-bit dtype.

The compressors accept PyTorch and TensorFlow tensors.
"""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """The base class of compressors."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to communicate, and a context that `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the decompressed tensor; `ctx` is the context from `compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Communicates tensors unchanged."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor."""
        return tensor


class _CastCompressor(Compressor):
    """Casts floating-point tensors to a 16-bit dtype, and passes other tensors through unchanged."""

    dtype: str

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        if isinstance(tensor, torch.Tensor):
            dtype, is_floating = getattr(torch, cls.dtype), tensor.is_floating_point()
        else:
            dtype, is_floating = cls.dtype, tensor.dtype.is_floating
        if not is_floating or tensor.dtype == dtype:
            return tensor, None
        return _cast(tensor, dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else _cast(tensor, ctx)


def _cast(tensor: Any, dtype: Any) -> Any:
    if isinstance(tensor, torch.Tensor):
        return tensor.to(dtype)
    import tensorflow

    return tensorflow.cast(tensor, dtype)


class FP16Compressor(_CastCompressor):
    """Communicates in float16."""

    dtype = "float16"


class BF16Compressor(_CastCompressor):
    """Communicates in bfloat16, which has the range of float32.  Horovod has no bfloat16 compressor."""

    dtype = "bfloat16"


class Compression:
    """The compressors, under Horovod's names."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
