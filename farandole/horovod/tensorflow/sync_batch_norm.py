"""Batch normalization with statistics from all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from farandole.horovod.basics import is_initialized, size
from farandole.horovod.tensorflow.operations import Sum, grouped_allreduce


@keras.saving.register_keras_serializable(package="farandole")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """A `keras.layers.BatchNormalization` layer that computes training statistics over the samples on all ranks.

    Batch sizes may differ between ranks, and batches may have masks.  Gradients flow through the statistics to the
    inputs on all ranks.  The layer first reduces the mean and then the squared deviations from the mean, so that the
    variance is accurate even for values far from zero.

    Args:
        arguments: The arguments of `keras.layers.BatchNormalization`, except `synchronized`.
    """

    def __init__(self, **arguments: Any) -> None:
        if arguments.pop("synchronized", False):
            raise ValueError(
                "synchronized=True applies to tf.distribute only; remove this option from hvd.SyncBatchNormalization"
            )
        super().__init__(**arguments)

    def get_config(self) -> dict[str, Any]:
        """Return the layer's options."""
        config: dict[str, Any] = super().get_config()
        del config["synchronized"]
        return config

    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        if not is_initialized() or size() == 1:
            moments: tuple[tf.Tensor, tf.Tensor] = super()._moments(inputs, mask)
            return moments
        weights = tf.ones_like(inputs)
        if mask is not None:
            weights *= tf.cast(tf.expand_dims(mask, -1), inputs.dtype)
        axes = self._reduction_axes
        count, total = _over_ranks(tf.reduce_sum(weights, axes), tf.reduce_sum(weights * inputs, axes))
        count = tf.maximum(count, 1)
        mean = total / count
        others = [1] * inputs.shape.rank
        others[self.axis] = -1
        deviations = weights * tf.square(inputs - tf.reshape(mean, others))
        (squares,) = _over_ranks(tf.reduce_sum(deviations, axes))
        return mean, squares / count


def _over_ranks(*tensors: tf.Tensor) -> list[tf.Tensor]:
    return grouped_allreduce(list(tensors), op=Sum)
