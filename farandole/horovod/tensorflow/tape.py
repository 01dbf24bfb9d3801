"""`DistributedGradientTape`: a gradient tape whose gradients are those of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.tensorflow.compression import Compression, Compressor
from farandole.horovod.tensorflow.operations import Average
from farandole.horovod.tensorflow.reducing import GradientReducer, Groups


class _DistributedGradientTape(tf.GradientTape):
    """What is mixed into the class of the tape that is wrapped."""

    _reducer: GradientReducer

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of a variable to this rank."""
        self._reducer.register_local(source)

    def gradient(self, target: Any, sources: Any, *arguments: Any, **keywords: Any) -> Any:
        """As the wrapped tape's, reduced over the ranks; in the structure of `sources`."""
        gradients = super().gradient(target, sources, *arguments, **keywords)
        flat = self._reducer(_flat(gradients), _flat(sources))
        return tf.nest.pack_sequence_as(sources, flat) if tf.nest.is_nested(sources) else flat[0]


def _flat(nest: Any) -> list[Any]:
    return list(tf.nest.flatten(nest, expand_composites=False))


def DistributedGradientTape(  # noqa: N802 - Horovod's spelling
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Wrap a tape, before or after it has recorded; `gradient` gives the average over the ranks then, or another `op`.

        with tf.GradientTape() as tape:
            loss = ...
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)

    The options are those of `GradientReducer`.  `jacobian` and `batch_jacobian` stay those of this rank.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise ValueError(f"a tf.GradientTape is expected, not {type(gradtape).__name__}")
    kind = type(gradtape)
    if issubclass(kind, _DistributedGradientTape):
        raise ValueError("this tape is distributed already: its gradients would be reduced twice")
    tape: Any = object.__new__(type(kind.__name__, (_DistributedGradientTape, kind), {}))
    tape.__dict__.update(vars(gradtape))
    tape._reducer = GradientReducer(
        "DistributedGradientTape",
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    return tape


def PartialDistributedGradientTape(  # noqa: N802 - Horovod's spelling
    gradtape: tf.GradientTape,
    *arguments: Any,
    local_layers: keras.layers.Layer | list[keras.layers.Layer] | None = None,
    **keywords: Any,
) -> Any:
    """`DistributedGradientTape` but for some layers, whose gradients are left to each rank.

    local_layers: a layer or several; the other arguments are those of `DistributedGradientTape`.
    """
    tape = DistributedGradientTape(gradtape, *arguments, **keywords)
    for layer in layers_of(local_layers):
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


def layers_of(local_layers: Any) -> list[keras.layers.Layer]:
    """A layer or several, as a list."""
    layers = [] if local_layers is None else local_layers
    layers = list(layers) if isinstance(layers, (list, tuple)) else [layers]
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(f"local_layers are Keras layers, not {type(layer).__name__}")
    return layers
