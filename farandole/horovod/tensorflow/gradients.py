"""Reduce gradients across ranks: `DistributedGradientTape` and the Keras optimizer `DistributedOptimizer`.

Dense gradients are reduced in groups, with one request per group.  By default all gradients form one group.  With
several groups, a group's reduction overlaps with the computation of the next group's gradients.  For each group, one
`bridge.call` submits the request without waiting.  A final `bridge.call` waits for all groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
import torch

from farandole.horovod.compression import Compression, Compressor
from farandole.horovod.process_sets import ProcessSet, global_process_set
from farandole.horovod.tensorflow import bridge
from farandole.horovod.tensorflow.bridge import call, name_in_graph
from farandole.horovod.tensorflow.operations import gather_slices, on_host
from farandole.horovod.torch.operations import Adasum, Average, grouped_allreduce_async, synchronize

Groups = int | Sequence[Sequence[Any]] | None


class GradientReducer:
    """Reduces lists of gradients across ranks.

    Args:
        name: The prefix of request names.
        device_dense: An empty string or the name of a CPU device.
        device_sparse: An empty string or the name of a CPU device.
        compression: The compressor for dense gradients.
        sparse_as_dense: Whether to reduce tf.IndexedSlices as dense tensors instead of gathering them.
        op: The reduction: Average, Sum, Adasum, Min, Max or Product.  tf.IndexedSlices require Average or Sum.
        gradient_predivide_factor: A factor that divides the gradients before the sum and multiplies the sum.  Requires
            op=Average.
        num_groups: Deprecated; use `groups`.
        groups: The number of groups of dense gradients, or a list of lists of variables.  None puts all dense gradients
            in one group.
        process_set: The participating ranks.
        scale_local_gradients: Whether to divide the gradients of local variables by the number of ranks.
            `register_local` marks a variable as local, and local gradients are not reduced.

    Raises:
        ValueError: if options are invalid or incompatible.
    """

    def __init__(
        self,
        name: str,
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
    ) -> None:
        on_host(device_dense)
        on_host(device_sparse)
        if gradient_predivide_factor != 1.0 and op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        if not gradient_predivide_factor > 0:
            raise ValueError(f"gradient_predivide_factor must be positive, got {gradient_predivide_factor}")
        if num_groups:
            warnings.warn("num_groups has been replaced by groups", DeprecationWarning, stacklevel=3)
            groups = num_groups if groups is None else groups
        self.name = name
        self.sparse_as_dense = sparse_as_dense
        self._compression, self._op, self._process_set = compression, op, process_set
        self._factor = gradient_predivide_factor
        self._groups = _check_groups(groups)
        self._scale_local = scale_local_gradients
        self._local: set[int] = set()

    def register_local(self, variable: Any) -> None:
        """Exclude a variable's gradient from the reduction."""
        self._local.add(_key(variable))

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients.

        Args:
            gradients: A gradient or None for each variable.  All ranks must have None for the same variables.
            variables: The variables.

        Returns:
            A reduced gradient or None for each variable.
        """
        size = self._process_set.size()
        if size == 1 or not self._process_set.included():
            return list(gradients)
        reduced = list(gradients)
        dense, sparse = [], []
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if _key(variable) in self._local:
                if self._scale_local:
                    reduced[index] = _scaled(gradient, 1 / size)
            elif isinstance(gradient, tf.IndexedSlices) and not self.sparse_as_dense:
                sparse.append(index)
            else:
                reduced[index] = tf.convert_to_tensor(gradient)
                bridge.check_type(reduced[index].dtype, getattr(variable, "name", None))
                dense.append(index)
        name = self._name(reduced, dense)
        waiting = []
        # the backward pass computes the last layers' gradients first
        for number, members in reversed(list(enumerate(self._grouped(dense, variables)))):
            narrow = [self._compression.compress(reduced[index]) for index in members]
            handle = self._submit(f"{name}.{number}", [each for each, _ in narrow])
            waiting.append((members, narrow, handle))
        if sparse:
            slices = [reduced[index] for index in sparse]
            for index, one in zip(
                sparse, gather_slices(slices, self._op, f"{name}.sparse", self._process_set), strict=True
            ):
                reduced[index] = one
        if waiting:
            self._collect(waiting, reduced)
        return reduced

    def _name(self, gradients: Sequence[Any], dense: Sequence[int]) -> str:
        """Return a request name that is the same in every step and usually differs between models."""
        if not tf.executing_eagerly():
            return name_in_graph(self.name, None) or self.name
        return f"{self.name}.{len(dense)}.{sum(gradients[index].shape.num_elements() for index in dense)}"

    def _submit(self, name: str, tensors: list[tf.Tensor]) -> tf.Tensor:
        """Start reducing a group of tensors, and return the handle."""
        scaled = {"prescale_factor": 1 / self._factor, "postscale_factor": self._factor}

        def on_torch(group: list[torch.Tensor]) -> list[torch.Tensor]:
            where = self._process_set
            return [
                torch.tensor(
                    grouped_allreduce_async(group, None, name, self._op, process_set=where, **scaled)
                )
            ]

        return call(on_torch, tensors, [tf.TensorSpec([], tf.int64)])[0]

    def _collect(self, waiting: Sequence[tuple[Any, Any, tf.Tensor]], reduced: list[Any]) -> None:
        """Wait for all groups, and store the results in `reduced`."""
        places = [index for members, _, _ in waiting for index in members]
        narrow = [one for _, group, _ in waiting for one in group]

        def on_torch(handles: list[torch.Tensor]) -> list[torch.Tensor]:
            return [tensor for handle in handles for tensor in synchronize(int(handle))]

        specs = [tf.TensorSpec(sent.shape, sent.dtype) for sent, _ in narrow]
        received = call(on_torch, [handle for _, _, handle in waiting], specs)
        for index, one, (_, ctx) in zip(places, received, narrow, strict=True):
            reduced[index] = self._compression.decompress(one, ctx)

    def _grouped(self, dense: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """Return the indices of the dense gradients in each group."""
        if self._groups is None:
            return [dense] if dense else []
        if isinstance(self._groups, int):
            share, more = divmod(len(dense), self._groups)
            lengths = [share + (number < more) for number in range(self._groups)]
            left = iter(dense)
            return [[next(left) for _ in range(length)] for length in lengths if length]
        numbers = {_key(variables[index]): index for index in dense}
        chosen = [[numbers.pop(key) for key in group if key in numbers] for group in self._groups]
        return [group for group in [*chosen, list(numbers.values())] if group]


def _check_groups(groups: Groups) -> int | list[list[int]] | None:
    """Check `groups`, and return `groups` with each variable replaced by its key."""
    if groups is None:
        return None
    if isinstance(groups, bool) or not isinstance(groups, (int, list, tuple)) or groups == 0:
        raise ValueError("groups should be a positive integer or a list of lists of tf.Variable.")
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError("groups should be a positive integer or a list of lists of tf.Variable.")
        return groups
    keys = [[_key(variable) for variable in group] for group in groups]
    flat = [key for group in keys for key in group]
    if len(set(flat)) < len(flat):
        raise ValueError("A variable can only appear once in groups.")
    return keys


def _key(variable: Any) -> int:
    """Return a key that is the same for a Keras variable and its TensorFlow variable."""
    return id(variable.value if isinstance(variable, keras.Variable) else variable)


def _scaled(gradient: Any, factor: float) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            gradient.values * tf.cast(factor, gradient.dtype), gradient.indices, gradient.dense_shape
        )
    return gradient * tf.cast(factor, gradient.dtype)


class _DistributedGradientTape(tf.GradientTape):
    """A mixin that makes a tape's `gradient` method reduce the gradients across ranks."""

    _reducer: GradientReducer

    def register_local_source(self, source: Any) -> None:
        """Exclude a variable's gradient from the reduction."""
        self._reducer.register_local(source)

    def gradient(self, target: Any, sources: Any, *arguments: Any, **keywords: Any) -> Any:
        """Compute the gradients with the wrapped tape, and reduce the gradients across ranks."""
        gradients = super().gradient(target, sources, *arguments, **keywords)
        flat = self._reducer(_flat(gradients), _flat(sources))
        return tf.nest.pack_sequence_as(sources, flat) if tf.nest.is_nested(sources) else flat[0]


def _flat(nest: Any) -> list[Any]:
    return list(tf.nest.flatten(nest, expand_composites=False))


def DistributedGradientTape(  # noqa: N802 - Horovod's name
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
    """Wrap a tape so that `gradient` reduces the gradients across ranks.

        with tf.GradientTape() as tape:
            loss = ...
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)

    The tape may already contain recorded operations.  The results of `jacobian` and `batch_jacobian` are not
    reduced.

    Args:
        gradtape: The tape to wrap.
        device_dense: An empty string or the name of a CPU device.
        device_sparse: An empty string or the name of a CPU device.
        compression: The compressor for dense gradients.
        sparse_as_dense: Whether to reduce tf.IndexedSlices as dense tensors instead of gathering them.
        op: The reduction: Average, Sum, Adasum, Min, Max or Product.  tf.IndexedSlices require Average or Sum.
        gradient_predivide_factor: A factor that divides the gradients before the sum and multiplies the sum.  Requires
            op=Average.
        num_groups: Deprecated; use `groups`.
        groups: The number of groups of dense gradients, or a list of lists of variables.  None puts all dense gradients
            in one group.
        process_set: The participating ranks.
        scale_local_gradients: Whether to divide the gradients of local variables by the number of ranks.
            `register_local_source` marks a variable as local, and local gradients are not reduced.

    Returns:
        A tape whose class derives from `type(gradtape)`.

    Raises:
        ValueError: if `gradtape` is not a tape or is already distributed, or options are invalid or incompatible.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise ValueError(f"expected a tf.GradientTape, got {type(gradtape).__name__}")
    kind = type(gradtape)
    if issubclass(kind, _DistributedGradientTape):
        raise ValueError(
            "this tape is already distributed, and its gradients would be reduced twice; wrap it once"
        )
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


def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    *arguments: Any,
    local_layers: keras.layers.Layer | list[keras.layers.Layer] | None = None,
    **keywords: Any,
) -> Any:
    """Wrap a tape as `DistributedGradientTape` does, but exclude the gradients of some layers from the reduction.

    Args:
        gradtape: The tape to wrap.
        arguments: Further positional arguments for `DistributedGradientTape`.
        local_layers: A layer or a list of layers whose gradients are not reduced.
        keywords: Further keyword arguments for `DistributedGradientTape`.
    """
    tape = DistributedGradientTape(gradtape, *arguments, **keywords)
    for layer in layers_of(local_layers):
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


def layers_of(local_layers: Any) -> list[keras.layers.Layer]:
    """Convert a layer, a list of layers or None to a list of layers."""
    layers = [] if local_layers is None else local_layers
    layers = list(layers) if isinstance(layers, (list, tuple)) else [layers]
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(f"expected local_layers to be Keras layers, got {type(layer).__name__}")
    return layers


# ---- the Keras optimizer ----


class _Accumulation:
    """Sums this rank's gradients over `passes` backward passes."""

    def __init__(self, gradients: Sequence[tf.Tensor | None], passes: int, average: bool) -> None:
        self._scale = 1 / passes if average else 1
        with tf.init_scope():
            self._done = tf.Variable(0, trainable=False)
            self._passes = passes
            # not part of the optimizer state, so that saved models contain only the plain optimizer's state
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
    """A mixin that makes a Keras optimizer's `apply` method reduce the gradients across ranks.

    `DistributedOptimizer` derives a class from this mixin, and stores the options as class attributes.
    """

    _reducer: GradientReducer
    _passes: int
    _average: bool

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Reduce the gradients across ranks, and apply the result.

        `apply_gradients` calls this method.  With backward_passes_per_step=n, gradients accumulate, and every n-th call
        reduces and applies their sums or averages.  `iterations` counts all calls.
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
    """Return a copy of a Keras 3 optimizer; the copy reduces gradients across ranks before each step.

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
        op: The reduction: Average, Sum, Min, Max or Product.  tf.IndexedSlices require Average or Sum.
        num_groups: Deprecated; use `groups`.
        groups: The number of groups of dense gradients, or a list of lists of variables.  None puts all dense gradients
            in one group.
        backward_passes_per_step: The number of `apply` calls whose gradients each rank accumulates before a step.
        average_aggregated_gradients: Whether to divide the accumulated gradients by `backward_passes_per_step`.
        process_set: The participating ranks.
        scale_local_gradients: Whether to divide the gradients of local variables by the number of ranks.
            `register_local_var` marks a variable as local, and local gradients are not reduced.

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
    """Copy an optimizer as `DistributedOptimizer` does, but exclude the gradients of some layers from the reduction.

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
            f"{type(optimizer).__name__}; TensorFlow 1 and tf_keras optimizers are not supported"
        )
    if isinstance(optimizer, DistributedKerasOptimizer):
        raise ValueError(
            "this optimizer is already distributed, and its gradients would be reduced twice; wrap it once"
        )
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if keras.config.dtype_policy().name == "mixed_float16" and not scales:
        raise ValueError(
            "with the policy mixed_float16, Keras would wrap this optimizer in a LossScaleOptimizer, and ranks would "
            "skip different steps; use "
            "hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
        )


def _copied(optimizer: Any, kind: type, name: str | None) -> Any:
    """Create an instance of `kind` with the optimizer's options, and with its state if the optimizer is built."""
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
