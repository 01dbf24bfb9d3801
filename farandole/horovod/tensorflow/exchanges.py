"""The operations that move tensors: all-gather, broadcast and all-to-all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch

from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.tensorflow.calls import call, name_in_graph
from farandole.horovod.tensorflow.forms import any_rows, as_tensors, differentiable, gradient_name, like
from farandole.horovod.torch import asynchronous as requests
from farandole.horovod.torch.asynchronous import Average, synchronize


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate all ranks' tensors along dimension 0, in which alone they may differ."""
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Concatenate each of several tensors over the ranks."""
    given = as_tensors(tensors, "allgather", name)
    name = name_in_graph("allgather", name, ignore_name_scope)

    def gather(*group: tf.Tensor) -> list[tf.Tensor]:
        def on_torch(group: list[torch.Tensor]) -> list[torch.Tensor]:
            gathered: list[torch.Tensor] = synchronize(
                requests.grouped_allgather_async(group, name, process_set)
            )
            return gathered

        return call(on_torch, group, any_rows(group))

    def backward(given: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        back = gradient_name(name)

        def on_torch(group: list[torch.Tensor]) -> list[torch.Tensor]:
            rows, *whole = group
            all_rows = requests.allgather_async(rows[None], back and f"{back}.rows", process_set)
            handle = requests.grouped_allreduce_async(whole, None, back, Average, process_set=process_set)
            reduced, starts = synchronize(handle), synchronize(all_rows)[: process_set.rank()].sum(0).tolist()
            return [
                each[start : start + count]
                for each, start, count in zip(reduced, starts, rows.tolist(), strict=True)
            ]

        rows = tf.stack([tf.shape(each, tf.int64)[0] for each in given])
        return call(on_torch, [rows, *gradients], like(given))

    return differentiable(gather, backward, given)


# ---- broadcast ----


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """The tensor of rank `root_rank` (its number in the world), on all ranks."""
    (given,) = as_tensors([tensor], "broadcast", name)
    name = name_in_graph("broadcast", name, ignore_name_scope)

    def send(value: tf.Tensor) -> list[tf.Tensor]:
        def on_torch(group: list[torch.Tensor]) -> list[torch.Tensor]:
            return [synchronize(requests.broadcast_async(group[0], root_rank, name, process_set))]

        return call(on_torch, [value], like([value]))

    def backward(_: Any, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        def on_torch(group: list[torch.Tensor]) -> list[torch.Tensor]:
            back = gradient_name(name)
            reduced = synchronize(
                requests.allreduce_async(group[0], None, back, Average, process_set=process_set)
            )
            ranks = process_set.ranks or []
            is_root = ranks[process_set.rank()] == root_rank
            return [reduced if is_root else torch.zeros_like(reduced)]

        return call(on_torch, gradients, like(gradients))

    return differentiable(send, backward, [given])[0]


# ---- all-to-all ----


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of `tensor` to each rank and receive rows from each, concatenated in rank order.

    splits: how many rows each rank gets, whole numbers; equally many if None.  With splits, returns also
    how many rows came from each rank (int32).
    """
    (given,) = as_tensors([tensor], "alltoall", name)
    name = name_in_graph("alltoall", name, ignore_name_scope)
    counts = tf.constant([], tf.int32) if splits is None else tf.convert_to_tensor(splits)
    if not counts.dtype.is_integer:
        raise ValueError(f"alltoall expects splits to be whole numbers, not {counts.dtype.name}")

    def exchange(name: str | None, value: tf.Tensor, counts: tf.Tensor) -> list[tf.Tensor]:
        def on_torch(group: list[torch.Tensor]) -> list[torch.Tensor]:
            return list(synchronize(requests.alltoall_async(group[0], group[1], name, process_set)))

        sizes = tf.TensorSpec([process_set.size()], tf.int32)
        return call(on_torch, [value, counts], [*any_rows([value]), sizes])

    @tf.custom_gradient
    def forward(value: tf.Tensor) -> Any:
        output, received = exchange(name, value, counts)

        def backward(gradient: tf.Tensor, _: Any) -> tf.Tensor:
            returned, _ = exchange(gradient_name(name), gradient, received)
            # rows beyond the splits went nowhere
            unsent = tf.shape(value)[0] - tf.shape(returned)[0]
            padding = tf.zeros(tf.concat([[unsent], tf.shape(value)[1:]], 0), gradient.dtype)
            return tf.ensure_shape(tf.concat([returned, padding], 0), value.shape)

        return (output, received), backward

    output, received = forward(given)
    return output if splits is None else (output, received)
