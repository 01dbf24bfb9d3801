"""Provide `DistributedOptimizer`, a Keras optimizer that reduces gradients across ranks before each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from farandole.horovod.process_sets import ProcessSet, global_process_set
from farandole.horovod.tensorflow.compression import Compression, Compressor
from farandole.horovod.tensorflow.gradients import GradientReducer, Groups, layers_of
from farandole.horovod.tensorflow.operations import Adasum, Average


class _Accumulation:
    """Sums this rank's gradients over `passes` backward passes.

    The sums are not part of the optimizer state, so that saved models contain only the plain optimizer's state.
    """

    def __init__(self, gradients: Sequence[tf.Tensor | None], passes: int, average: bool) -> None:
        self._scale = 1 / passes if average else 1
        with tf.init_scope():
            self._done = tf.Variable(0, trainable=False)
            self._passes = passes
            self._sums = [
                None if one is None else tf.Variable(tf.zeros(one.shape, one.dtype), trainable=False)
                for one in gradients
            ]

    def add(self, gradients: Sequence[Any]) -> tf.Tensor:
        """Add the gradients from one pass, and return whether this is the last pass."""
        for total, gradient in zip(self._sums, gradients, strict=True):
            if total is not None:
                total.assign_add(tf.convert_to_tensor(gradient))
        self._done.assign_add(1)
        return tf.equal(self._done, self._passes)

    def take(self) -> list[tf.Tensor | None]:
        """Return the sums or averages, and reset the sums to zero."""
        self._done.assign(0)
        taken = [None if total is None else total * tf.cast(self._scale, total.dtype) for total in self._sums]
        for total in self._sums:
            if total is not None:
                total.assign(tf.zeros_like(total))
        return taken


class DistributedKerasOptimizer:
    """The mixin for the wrapped optimizer's class.  The options are attributes of the new class."""

    _reducer: GradientReducer
    _passes: int
    _average: bool

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Reduce the gradients across ranks, and apply the result.

        `apply_gradients` calls this method.  With backward_passes_per_step=n, gradients accumulate, and every n-th call
        reduces and applies the sums.  `iterations` counts all calls.
        """
        optimizer: Any = self
        apply_now = super().apply  # type: ignore[misc]
        gradients = list(grads)
        if trainable_variables is None:
            variables = list(optimizer._trainable_variables) if optimizer.built else []
        else:
            variables = list(trainable_variables)
        if len(gradients) != len(variables):  # the wrapped optimizer then raises the error
            apply_now(gradients, trainable_variables)
            return
        if self._passes == 1:
            apply_now(self._reducer(gradients, variables), variables)
            return
        if any(isinstance(one, tf.IndexedSlices) for one in gradients) and not self._reducer.sparse_as_dense:
            raise ValueError(
                "IndexedSlices are not supported when backward_passes_per_step > 1 and sparse_as_dense is False: "
                "pass sparse_as_dense=True"
            )
        if not optimizer.built:
            with tf.init_scope():
                optimizer.build(variables)
        if not hasattr(self, "_accumulation"):
            self._accumulation = _Accumulation(gradients, self._passes, self._average)
        is_last = self._accumulation.add(gradients)

        def step() -> tf.Tensor:
            apply_now(self._reducer(self._accumulation.take(), variables), variables)
            return tf.constant(True)

        def accumulate_only() -> tf.Tensor:
            optimizer.iterations.assign_add(1)
            return tf.constant(False)

        tf.cond(is_last, step, accumulate_only)

    def register_local_var(self, variable: Any) -> None:
        """Exclude a variable's gradient from the reduction."""
        self._reducer.register_local(variable)


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: Groups = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a copy of a Keras 3 optimizer that reduces gradients across ranks before each step.

    Keras saves the copy as a plain optimizer, and `hvd.load_model` wraps it again.  Gradients are reduced before the
    optimizer clips them.  On a machine with a GPU, call `model.compile` with jit_compile=False.

    Args:
        optimizer: The optimizer to copy.
        name: The copy's name, and the prefix for request names.
        device_dense: An empty string or the name of a CPU device.
        device_sparse: An empty string or the name of a CPU device.
        compression: The compressor for dense gradients.
        sparse_as_dense: Whether to reduce tf.IndexedSlices as dense tensors instead of gathering them.
        gradient_predivide_factor: A factor that divides the gradients before the sum and multiplies the sum.  Requires
            op=Average.
        op: The reduction; Adasum is not supported.
        num_groups: Deprecated; use `groups`.
        groups: The number of dense gradient groups, or a list of lists of variables.
        backward_passes_per_step: The number of `apply` calls that each rank accumulates before a step.
        average_aggregated_gradients: Whether to divide the accumulated gradients by `backward_passes_per_step`.
        process_set: The participating ranks.
        scale_local_gradients: Whether to divide local variables' gradients by the number of ranks.

    Returns:
        An optimizer whose class derives from `type(optimizer)`.

    Raises:
        ValueError: if `optimizer` is not a Keras 3 optimizer or is already distributed, or options are invalid or
            incompatible.
    """
    _check_optimizer(optimizer)
    if op == Adasum:
        raise ValueError(
            "op=Adasum is not supported by the optimizer for Keras; "
            "use hvd.DistributedGradientTape(tape, op=hvd.Adasum)"
        )
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step must be 1 or more, got {backward_passes_per_step}")
    reducer = GradientReducer(
        name or f"Distributed{type(optimizer).__name__}",
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
    kind = type(optimizer)
    # Keras saves an optimizer by its class's name and module; class attributes survive cloning
    members = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "_reducer": reducer,
        "_passes": backward_passes_per_step,
        "_average": average_aggregated_gradients,
    }
    return _copied(optimizer, type(kind.__name__, (DistributedKerasOptimizer, kind), members), name)


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: keras.optimizers.Optimizer, *arguments: Any, local_layers: Any = None, **keywords: Any
) -> Any:
    """Wrap an optimizer like `DistributedOptimizer`, but do not reduce local layers' gradients.

    Args:
        optimizer: The optimizer to copy.
        arguments: Further positional arguments for `DistributedOptimizer`.
        local_layers: A built layer or a list of built layers whose gradients are not reduced.
        keywords: Further keyword arguments for `DistributedOptimizer`.
    """
    distributed = DistributedOptimizer(optimizer, *arguments, **keywords)
    for layer in layers_of(local_layers):
        for variable in layer.trainable_weights:
            distributed.register_local_var(variable)
    return distributed


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            f"expected a Keras 3 optimizer (keras.optimizers), got {type(optimizer).__module__}."
            f"{type(optimizer).__name__}; optimizers of TensorFlow 1 and tf_keras are not supported"
        )
    if isinstance(optimizer, DistributedKerasOptimizer):
        raise ValueError(
            "this optimizer is already distributed, and its gradients would be reduced twice; wrap it once"
        )
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if keras.config.dtype_policy().name == "mixed_float16" and not scales:
        raise ValueError(
            "with the policy mixed_float16 Keras would wrap this optimizer in a LossScaleOptimizer, and ranks would "
            "skip different steps; use "
            "hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
        )


def _copied(optimizer: Any, kind: type, name: str | None) -> Any:
    """Create an instance of class `kind` with the optimizer's options, and its state if the optimizer is built."""
    config = optimizer.get_config()
    schedule = getattr(optimizer, "_learning_rate", None)
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        config["learning_rate"] = (
            schedule  # pass the object itself, because its class may not be registered with Keras
        )
    if name is not None:
        config["name"] = name
    copy: Any = kind.from_config(config)  # type: ignore[attr-defined]
    if optimizer.built:
        copy.build(optimizer._trainable_variables)
        for copied, original in zip(copy.variables, optimizer.variables, strict=True):
            copied.assign(original)
    return copy
