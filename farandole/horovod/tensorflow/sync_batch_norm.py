"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from farandole.horovod.basics import is_initialized, size
from farandole.horovod.tensorflow.operations import Sum, grouped_allreduce


@keras.saving.register_keras_serializable(package="farandole")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` whose statistics in training are those of all ranks' samples.

    Batches may differ in size among ranks, and have masks.  Gradients flow through the statistics to all ranks'
    inputs.  First the mean is reduced and then the squares of the deviations from it, so that the variance of
    values far from zero keeps its digits.
    """

    def __init__(self, **arguments: Any) -> None:
        if arguments.pop("synchronized", False):
            raise ValueError(
                "synchronized=True is tf.distribute's; hvd.SyncBatchNormalization needs no such option"
            )
        super().__init__(**arguments)

    def get_config(self) -> dict[str, Any]:
        """Return the options of the layer."""
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
