"""Python functions of torch tensors, called on TensorFlow's: at once where it is eager, as a node of a graph else.

*Order.*  A node blocks the thread that runs it until the other ranks have come, and a process may have no more than
one thread for nodes.  So the nodes of a graph, and of the functions, loops and branches in it, run one after the
other, in the order in which they were traced: each writes to one resource before and after, and `tf.function` keeps
the order of writes (its automatic control dependencies).  Let k be the first of these nodes that has not ended on
every rank.  All before it have ended, all after it wait for it; so no thread of any rank is blocked but by k itself,
and what k's inputs need can be computed.  Ranks that have traced the same program have the same k, all come to it, and
it ends.  One thread is enough for that.  (Ranks that have traced different programs are told so by the engine:
those that wait are named, and a deadline ends the run.)

*Names.*  A node without a name gets one when it is traced: the names of the functions around it and a number within
the graph.  Tracing again gives the same names, so that ranks need not trace equally often.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import torch
from tensorflow.python.ops import control_flow_util

from farandole.horovod.common.exceptions import HorovodInternalError, MismatchError
from farandole.horovod.tensorflow import bridge

Function = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


class InvalidArgumentError(tf.errors.InvalidArgumentError, ValueError):
    """An argument is wrong, or a name is in flight."""


class FailedPreconditionError(tf.errors.FailedPreconditionError, MismatchError):
    """Ranks asked for different operations under one name."""


class UnknownError(tf.errors.UnknownError, HorovodInternalError):
    """A rank died, or Horovod was shut down."""


class _Order:
    """The resource to which every node writes; it is made when the first one is traced, and holds a number."""

    def __init__(self) -> None:
        self._written: tf.Variable | None = None

    def write(self) -> tf.Operation:
        """A write, in the graph that is being traced."""
        if self._written is None:
            with tf.init_scope(), tf.device("/cpu:0"):
                self._written = tf.Variable(False, trainable=False, name="horovod_order")
        return self._written.assign(False, read_value=False)


_order = _Order()


def call(
    function: Function, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    """What `function` makes of the inputs: tensors of the types of `outputs` and of shapes that fit theirs.

    Raises:
        InvalidArgumentError, FailedPreconditionError, UnknownError: In eager mode; each is an error of `tf.errors` and
            the exception that `function` raised.  In a graph TensorFlow raises `tf.errors.InvalidArgumentError` for a
            ValueError and `tf.errors.UnknownError` for other exceptions, and the message names the exception.
    """
    if tf.executing_eagerly():
        try:
            results = function([bridge.from_eager(given) for given in inputs])
        except ValueError as error:
            raise InvalidArgumentError(None, None, str(error)) from error
        except MismatchError as error:
            raise FailedPreconditionError(None, None, str(error)) from error
        except HorovodInternalError as error:
            raise UnknownError(None, None, str(error)) from error
        return [bridge.to_eager(made, spec.dtype) for made, spec in zip(results, outputs, strict=True)]
    _check_graph(tf.compat.v1.get_default_graph())

    def on_arrays(*arrays: Any) -> list[bridge.Array]:
        results = function([bridge.from_numpy(each) for each in arrays])
        return [bridge.to_numpy(made, spec.dtype) for made, spec in zip(results, outputs, strict=True)]

    with tf.device("/cpu:0"):
        with tf.control_dependencies([_order.write()]):
            made = tf.numpy_function(on_arrays, list(inputs), [spec.dtype for spec in outputs])
        with tf.control_dependencies(made):
            _order.write()
    for tensor, spec in zip(made, outputs, strict=True):
        tensor.set_shape(spec.shape)
    return list(made)


def name_in_graph(kind: str, name: str | None, ignore_name_scope: bool = False) -> str | None:
    """The name of an operation that is being traced; in eager mode the one that it was given, if it was.

    ignore_name_scope: do not put TensorFlow's name scope before a name that was given.
    """
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    if name is not None:
        scope = "" if ignore_name_scope else graph.get_name_scope()
        return f"{scope}/{name}" if scope else name
    path = [graph.unique_name(kind)]
    while hasattr(graph, "outer_graph"):
        # TensorFlow numbers its functions in the order of tracing, which ranks need not share
        path.insert(0, re.sub(r"_\d+(?=_|$)", "", graph.name))
        graph = graph.outer_graph
    return "/".join(path)


def _check_graph(graph: tf.Graph) -> None:
    if not hasattr(graph, "outer_graph"):
        raise NotImplementedError(
            "Horovod's operations run eagerly and within tf.function; TensorFlow 1's graphs and sessions are not "
            "supported: leave tf.compat.v1.disable_eager_execution() out"
        )
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        raise NotImplementedError(
            "XLA cannot compile Horovod's operations, which leave TensorFlow: use tf.function without jit_compile=True, "
            "and with Keras model.compile(..., jit_compile=False), because its default compiles where there is a GPU"
        )
