"""Apply PyTorch functions to TensorFlow tensors: directly in eager mode, and as graph nodes in `tf.function`.

*Memory.*  Eager tensors are converted through DLPack.  Within a `tf.function`, TensorFlow passes numpy arrays that are
views of TensorFlow tensors.  A contiguous result is converted without a copy if its address meets TensorFlow's
alignment requirement.  Operations return new tensors and do not write to their inputs.  PyTorch cannot compute with
uint16, uint32 or uint64, so tensors with these dtypes are reinterpreted as signed tensors of the same width.

*Order.*  A node blocks its thread until the other ranks have started the same operation, and some processes have only
one thread that runs nodes.  The nodes in a graph and in its functions, loops and branches must therefore run one after
another, in tracing order.  To ensure this, each node writes to a shared resource before and after its operation, and
`tf.function` preserves the order of the writes (automatic control dependencies).  Ranks that have traced the same
program run the nodes in the same order, so one thread is sufficient.  If ranks have traced different programs, the
engine reports the missing ranks and ends the run after a timeout.

*Names.*  An unnamed node gets a name during tracing.  The name consists of the enclosing functions' names, the
operation kind and, if necessary, a number that makes the name unique within the graph.  Retracing generates the same
names, so one rank may retrace more often than another rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch
from tensorflow.python.ops import control_flow_util

from farandole.horovod.requests import HorovodInternalError, MismatchError

Array = np.ndarray[Any, np.dtype[Any]]

SUPPORTED = (
    tf.uint8,
    tf.uint16,
    tf.int8,
    tf.int16,
    tf.int32,
    tf.int64,
    tf.float16,
    tf.bfloat16,
    tf.float32,
    tf.float64,
    tf.bool,
)
"""The dtypes that can be communicated."""

_ALIGNMENT = 64
"""TensorFlow aborts the process if a DLPack tensor's address is not a multiple of this number of bytes."""

_AS_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

_BFLOAT16 = tf.bfloat16.as_numpy_dtype  # defined by a numpy extension, and not supported by torch.from_numpy


def check_type(dtype: tf.DType, name: str | None) -> None:
    """Raise ValueError if tensors with this dtype cannot be communicated."""
    if dtype not in SUPPORTED:
        given = "" if name is None else f" {name}"
        raise ValueError(
            f"Tensor{given} of type {dtype.name} is not supported; expected one of "
            f"{', '.join(one.name for one in SUPPORTED)}; "
            f"use hvd.broadcast_object or hvd.allgather_object for other objects"
        )


def from_eager(tensor: tf.Tensor) -> torch.Tensor:
    """Convert an eager tensor to a PyTorch tensor on the CPU.

    A tensor on the CPU shares memory with the result.  A tensor on another device is copied.
    """
    if "CPU" not in tensor.device:
        with tf.device("/cpu:0"):
            tensor = tf.identity(tensor)
    return _as_signed(torch.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor)))


def to_eager(tensor: torch.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Convert a PyTorch tensor to an eager tensor.

    Args:
        tensor: The tensor, which shares memory with the result if possible.
        dtype: The result's dtype: either the dtype of `tensor`, or the unsigned dtype of the same width.
    """
    # an empty tensor has no memory to share
    if not tensor.numel():
        return tf.zeros(tuple(tensor.shape), dtype)
    whole = tensor.contiguous()
    if whole.data_ptr() % _ALIGNMENT:  # for example rows of a larger tensor
        whole = whole.clone()
    made = tf.experimental.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(whole))
    return made if made.dtype == dtype else tf.bitcast(made, dtype)


def from_numpy(array: Any) -> torch.Tensor:
    """Return a PyTorch tensor that shares memory with an array from TensorFlow; a scalar is copied."""
    array = np.asarray(array)
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return _as_signed(torch.from_numpy(array))


def to_numpy(tensor: torch.Tensor, dtype: tf.DType) -> Array:
    """Convert a PyTorch tensor to an array for TensorFlow.

    Args:
        tensor: The tensor, which shares memory with the result if it is contiguous.
        dtype: The result's dtype: either the dtype of `tensor`, or the unsigned dtype of the same width.
    """
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    array: Array = tensor.contiguous().numpy()
    return array if array.dtype == dtype.as_numpy_dtype else array.view(dtype.as_numpy_dtype)


def _as_signed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_AS_SIGNED[tensor.dtype]) if tensor.dtype in _AS_SIGNED else tensor


Function = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


class InvalidArgumentError(tf.errors.InvalidArgumentError, ValueError):
    """Raised if an argument is invalid, or an operation with the same name is already in flight."""


class FailedPreconditionError(tf.errors.FailedPreconditionError, MismatchError):
    """Raised if ranks submit different operations under the same name."""


class UnknownError(tf.errors.UnknownError, HorovodInternalError):
    """Raised if a rank dies or Horovod is shut down."""


class _Order:
    """A TensorFlow variable that every node writes to, so that the nodes run in tracing order."""

    def __init__(self) -> None:
        self._written: tf.Variable | None = None

    def write(self) -> tf.Operation:
        """Add a write operation to the graph that is being traced, and return the write operation."""
        if self._written is None:
            with tf.init_scope(), tf.device("/cpu:0"):
                self._written = tf.Variable(False, trainable=False, name="horovod_order")
        return self._written.assign(False, read_value=False)


_order = _Order()


def call(
    function: Function, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    """Apply a PyTorch function to TensorFlow tensors.

    Within a graph, TensorFlow raises `tf.errors.InvalidArgumentError` if `function` raises ValueError, and
    `tf.errors.UnknownError` if `function` raises HorovodInternalError.  The exception contains the original message.

    Args:
        function: A function that takes and returns PyTorch tensors.
        inputs: The TensorFlow tensors to convert and pass to `function`.
        outputs: The dtypes and shapes of the results.

    Returns:
        The results of `function` as TensorFlow tensors.

    Raises:
        InvalidArgumentError: in eager mode, if `function` raised ValueError.
        FailedPreconditionError: in eager mode, if `function` raised MismatchError.
        UnknownError: in eager mode, if `function` raised another HorovodInternalError.
    """
    if tf.executing_eagerly():
        try:
            results = function([from_eager(given) for given in inputs])
        except ValueError as error:
            raise InvalidArgumentError(None, None, str(error)) from error
        except MismatchError as error:
            raise FailedPreconditionError(None, None, str(error)) from error
        except HorovodInternalError as error:
            raise UnknownError(None, None, str(error)) from error
        return [to_eager(made, spec.dtype) for made, spec in zip(results, outputs, strict=True)]
    _check_graph(tf.compat.v1.get_default_graph())

    def on_arrays(*arrays: Any) -> list[Array]:
        results = function([from_numpy(each) for each in arrays])
        return [to_numpy(made, spec.dtype) for made, spec in zip(results, outputs, strict=True)]

    with tf.device("/cpu:0"):
        with tf.control_dependencies([_order.write()]):
            made = tf.numpy_function(on_arrays, list(inputs), [spec.dtype for spec in outputs])
        with tf.control_dependencies(made):
            _order.write()
    for tensor, spec in zip(made, outputs, strict=True):
        tensor.set_shape(spec.shape)
    return list(made)


def name_in_graph(kind: str, name: str | None, ignore_name_scope: bool = False) -> str | None:
    """Return the name of an operation in the graph that is being traced, or `name` in eager mode.

    Args:
        kind: The operation kind, which becomes part of the name if `name` is None.
        name: The name given by the program, or None.
        ignore_name_scope: Whether to omit TensorFlow's name scope, which otherwise precedes `name`.
    """
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    if name is not None:
        scope = "" if ignore_name_scope else graph.get_name_scope()
        return f"{scope}/{name}" if scope else name
    path = [graph.unique_name(kind)]
    while hasattr(graph, "outer_graph"):
        # TensorFlow numbers its functions in tracing order, which may differ between ranks
        path.insert(0, re.sub(r"_\d+(?=_|$)", "", graph.name))
        graph = graph.outer_graph
    return "/".join(path)


def _check_graph(graph: tf.Graph) -> None:
    if not hasattr(graph, "outer_graph"):
        raise NotImplementedError(
            "Horovod operations run in eager mode and within tf.function; TensorFlow 1 graphs and sessions are not "
            "supported; remove tf.compat.v1.disable_eager_execution()"
        )
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        raise NotImplementedError(
            "XLA cannot compile Horovod operations; remove jit_compile=True from tf.function. In Keras, call "
            "model.compile(..., jit_compile=False), because Keras enables XLA by default on machines with a GPU"
        )
