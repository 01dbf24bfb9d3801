"""Variables and objects, made equal on all ranks."""

from __future__ import annotations

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
    """Return the TensorFlow variable of a Keras variable; raise ValueError for other objects."""
    if isinstance(variable, keras.Variable):
        variable = variable.value
    if not isinstance(variable, tf.Variable):
        raise ValueError(f"a tf.Variable or a keras.Variable is expected, not {type(variable).__name__}")
    return variable


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Assign the values of rank `root_rank` to the variables of all ranks.

    All ranks pass the same variables in the same order.

    inplace: as in Horovod, where it saves a copy; what is received is assigned in either case.
    """
    assert isinstance(inplace, bool)
    targets = [tf_variable(variable) for variable in variables]
    if not targets:
        return
    values = [tf.convert_to_tensor(target) for target in targets]
    for target in targets:
        if target.dtype not in (tf.uint32, tf.uint64):  # which can be copied but not reduced
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
    """Assign rank `root_rank`'s value of a variable, or of each in a list; returns what it was given."""
    if name is not None:
        raise ValueError(f"name={name!r}: variables are matched by their order; leave it out")
    broadcast_variables(
        variables if isinstance(variables, (list, tuple)) else [variables], root_rank, process_set
    )
    return variables


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Raise RuntimeError, because TensorFlow 2 has no global variables; use `broadcast_variables` with a list."""
    raise RuntimeError(
        "hvd.broadcast_global_variables() does not support eager execution. Please use "
        f"`hvd.broadcast_variables(<model/optimizer variables>, root_rank={root_rank})` instead."
    )


def _check_session(session: Any) -> None:
    if session is not None:
        raise ValueError("sessions of TensorFlow 1 are not supported: leave session out")


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of rank `root_rank`, sent with pickle; the objects of other ranks are ignored."""
    _check_session(session)
    return functions.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that sends the object of rank `root_rank`."""
    _check_session(session)
    return lambda obj: functions.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in rank order."""
    _check_session(session)
    return functions.allgather_object(obj, name, process_set)
