"""`horovod.tensorflow.keras`: the interface of Horovod 0.28 for Keras 3 on TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import farandole.horovod.tensorflow as _tensorflow
from farandole.horovod.tensorflow import *  # noqa: F403
from farandole.horovod.tensorflow import callbacks
from farandole.horovod.tensorflow.compression import Compressor
from farandole.horovod.tensorflow.optimizer import DistributedOptimizer, PartialDistributedOptimizer

import keras as _keras  # isort: skip - after the message that TensorFlow is missing

if _keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"farandole.horovod.keras needs Keras on TensorFlow, and KERAS_BACKEND is {_keras.backend.backend()}; "
        f"with the torch backend use farandole.horovod.torch"
    )


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = _tensorflow.Compression.none,
) -> Any:
    """Load a model saved by Keras with a distributed optimizer that has the saved state.

    custom_optimizers: classes of optimizers that Keras does not know; custom_objects: other such classes by name.
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
