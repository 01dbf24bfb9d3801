"""Horovod's collective operations on TensorFlow's tensors, eager and within `tf.function`, with gradients through them.

An operation is a request under a name: ranks may issue named operations in any order, and those without a name
in the same order.  Gradients follow Horovod's convention: a result that every rank has is taken to enter each rank's
loss, and what counts is the *average* of the losses.

The errors of all of them: ValueError for arguments that are wrong by themselves and before `hvd.init()`,
and for a name that is in flight; `HorovodInternalError` where ranks disagree or a rank dies; see `calls.call`.
"""

from __future__ import annotations

import tensorflow as tf
import torch

from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.tensorflow.calls import call
from farandole.horovod.tensorflow.exchanges import allgather, alltoall, broadcast, grouped_allgather
from farandole.horovod.tensorflow.reductions import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from farandole.horovod.torch import asynchronous as requests
from farandole.horovod.torch.asynchronous import Adasum, Average, Max, Min, Product, Sum


def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> None:
    """Wait until every rank is here.  ValueError for a name: barriers are matched by their order."""
    if name is not None:
        raise ValueError(f"barriers have no names, they are matched by their order: leave name={name!r} out")

    def on_torch(_: list[torch.Tensor]) -> list[torch.Tensor]:
        requests.barrier(process_set)
        return [torch.zeros(1)]

    call(on_torch, [], [tf.TensorSpec([1], tf.float32)])


def join() -> int | tf.Tensor:
    """Say that this rank has run out of data, and wait until all have; returns the rank that was the last.

    Until then this rank contributes zeros to the sums and averages of the others.  Other operations of theirs raise.
    """
    if tf.executing_eagerly():
        return requests.join()
    last = call(
        lambda _: [torch.tensor(requests.join(), dtype=torch.int32)], [], [tf.TensorSpec([], tf.int32)]
    )
    return last[0]


__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]
