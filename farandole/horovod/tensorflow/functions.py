"""Broadcast variables, and broadcast or gather Python objects.

This module also contains the functions of `horovod.tensorflow.util`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import keras
import tensorflow as tf
import torch

from farandole.horovod.process_sets import ProcessSet, global_process_set
from farandole.horovod.tensorflow import bridge
from farandole.horovod.tensorflow.bridge import call, name_in_graph
from farandole.horovod.torch import functions
from farandole.horovod.torch.operations import broadcast_async, synchronize


def tf_variable(variable: Any) -> tf.Variable:
    """Return the TensorFlow variable that a Keras variable wraps; return a TensorFlow variable unchanged.

    Raises:
        ValueError: if the object is not a variable.
    """
    if isinstance(variable, keras.Variable):
        variable = variable.value
    if not isinstance(variable, tf.Variable):
        raise ValueError(f"expected a tf.Variable or a keras.Variable, got {type(variable).__name__}")
    return variable


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Copy the variables' values from rank `root_rank` to all ranks.

    Args:
        variables: The variables, in the same order on all ranks.
        root_rank: The rank to copy from.
        process_set: The participating ranks.
        inplace: Ignored.  In Horovod, this option avoids a copy.

    Raises:
        ValueError: if an object in `variables` is not a variable, or a variable has an unsupported dtype.
    """
    assert isinstance(inplace, bool)
    targets = [tf_variable(variable) for variable in variables]
    if not targets:
        return
    values = [tf.convert_to_tensor(target) for target in targets]
    for target in targets:
        if target.dtype not in (tf.uint32, tf.uint64):  # these dtypes can be copied but not reduced
            bridge.check_type(target.dtype, target.name)
    name = name_in_graph("broadcast_variables", None)

    def on_torch(group: list[torch.Tensor]) -> list[torch.Tensor]:
        handles = [
            broadcast_async(each, root_rank, name and f"{name}.{index}", process_set)
            for index, each in enumerate(group)
        ]
        return [synchronize(handle) for handle in handles]

    received = call(on_torch, values, [tf.TensorSpec(value.shape, value.dtype) for value in values])
    for target, value in zip(targets, received, strict=True):
        target.assign(value)


def broadcast_(
    variables: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Copy the value of each variable from rank `root_rank` to all ranks.

    Args:
        variables: A variable, or a list of variables in the same order on all ranks.
        root_rank: The rank to copy from.
        name: Must be None.
        process_set: The participating ranks.

    Returns:
        The argument `variables`.

    Raises:
        ValueError: if `name` is not None, or an object in `variables` is not a variable.
    """
    if name is not None:
        raise ValueError(f"name={name!r} is not supported, because variables are matched by order; omit name")
    broadcast_variables(
        variables if isinstance(variables, (list, tuple)) else [variables], root_rank, process_set
    )
    return variables


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Raise RuntimeError, because TensorFlow 2 has no global variables; use `broadcast_variables`."""
    raise RuntimeError(
        "hvd.broadcast_global_variables() does not support eager execution. Please use "
        f"`hvd.broadcast_variables(<model/optimizer variables>, root_rank={root_rank})` instead."
    )


def _check_session(session: Any) -> None:
    if session is not None:
        raise ValueError("TensorFlow 1 sessions are not supported; omit session")


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return rank `root_rank`'s object on all ranks.

    Args:
        obj: The object, which is pickled on rank `root_rank` and ignored on other ranks.
        root_rank: The rank to copy from.
        session: Must be None.
        name: The name of the operation.
        process_set: The participating ranks.
    """
    _check_session(session)
    return functions.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that broadcasts an object from rank `root_rank`; see `broadcast_object`."""
    _check_session(session)
    return lambda obj: functions.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects from all ranks, in rank order.

    Args:
        obj: This rank's object, which is pickled.
        session: Must be None.
        name: The name of the operation.
        process_set: The participating ranks.
    """
    _check_session(session)
    return functions.allgather_object(obj, name, process_set)


# ---- horovod.tensorflow.util ----


def _executing_eagerly() -> bool:
    return bool(tf.executing_eagerly())


def _make_subgraph(function: Callable[..., Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = tf.function(function)
    return made


def _cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that caches the results of `function`, separately for eager mode and graphs."""
    results: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(function)
    def cached(*arguments: Any) -> Any:
        key = (*arguments, _executing_eagerly())
        if key not in results:
            results[key] = function(*arguments)
        return results[key]

    return cached
