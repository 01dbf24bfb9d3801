"""Horovod 0.28's API for Keras 3 with TensorFlow: `horovod.tensorflow.keras`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import farandole.horovod.tensorflow as _tensorflow
from farandole.horovod.compression import Compressor
from farandole.horovod.tensorflow import *  # noqa: F403
from farandole.horovod.tensorflow import callbacks
from farandole.horovod.tensorflow.gradients import DistributedOptimizer, PartialDistributedOptimizer

import keras as _keras  # isort: skip - the import of TensorFlow reports a missing TensorFlow first

if _keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"farandole.horovod.keras requires the TensorFlow backend of Keras, but the backend is "
        f"{_keras.backend.backend()}; set KERAS_BACKEND=tensorflow, or use farandole.horovod.torch with PyTorch"
    )


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = _tensorflow.Compression.none,
) -> Any:
    """Load a Keras model, and wrap its optimizer with `DistributedOptimizer`.

    Args:
        filepath: The model file.
        custom_optimizers: Optimizer classes that are not part of Keras.
        custom_objects: A dict that maps names to other classes and functions that are not part of Keras.
        compression: The gradient compressor.

    Returns:
        The model, with the saved optimizer state.
    """
    known = dict(custom_objects or {}) | {kind.__name__: kind for kind in custom_optimizers or ()}
    model = _keras.models.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model


__all__ = [
    *_tensorflow.__all__,
    "PartialDistributedOptimizer",
    "callbacks",
    "load_model",
]
