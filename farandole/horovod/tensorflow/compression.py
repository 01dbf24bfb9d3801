"""Gradient compression: communicate gradients in a 16-bit data type."""

from __future__ import annotations

import tensorflow as tf


class Compressor:
    """The base class of compressors."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType | None]:
        """Return the tensor to communicate, and the context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: tf.DType | None) -> tf.Tensor:
        """Return the tensor in its original data type."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Communicates tensors unchanged."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType | None]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: tf.DType | None) -> tf.Tensor:
        """Return the tensor."""
        return tensor


class _CastCompressor(Compressor):
    """Casts floating-point tensors to a 16-bit data type, and passes other tensors through unchanged."""

    dtype: tf.DType

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType | None]:
        """Cast the tensor to the 16-bit data type.  Return the result and the original data type."""
        if not tensor.dtype.is_floating or tensor.dtype == cls.dtype:
            return tensor, None
        return tf.cast(tensor, cls.dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: tf.DType | None) -> tf.Tensor:
        """Return the tensor in its original data type."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class FP16Compressor(_CastCompressor):
    """Communicates in float16."""

    dtype = tf.float16


class BF16Compressor(_CastCompressor):
    """Communicates in bfloat16, which has float32's range.  Horovod has no counterpart."""

    dtype = tf.bfloat16


class Compression:
    """The compressors, under Horovod's names."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
