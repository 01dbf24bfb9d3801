"""The operations that reduce tensors: all-reduce and reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch

from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.tensorflow.calls import call, name_in_graph
from farandole.horovod.tensorflow.compression import Compression, Compressor
from farandole.horovod.tensorflow.exchanges import grouped_allgather
from farandole.horovod.tensorflow.forms import (
    any_rows,
    as_tensors,
    differentiable,
    gradient_name,
    like,
    on_host,
)
from farandole.horovod.torch import asynchronous as requests
from farandole.horovod.torch.asynchronous import Average, Max, Min, Product, Sum, synchronize


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor or variable over the ranks; by default the average.  A new tensor of its shape and type.

    tf.IndexedSlices are gathered: the result has the slices of all ranks, whose sum (or average) they stand for.
    prescale_factor, postscale_factor: multiply before and after the reduction.
    """
    if isinstance(tensor, tf.IndexedSlices):
        on_host(device_sparse)
        given = (compression is not Compression.none, prescale_factor != 1, postscale_factor != 1)
        if any(given):
            raise ValueError(
                "compression and factors are not supported for tf.IndexedSlices; tf.convert_to_tensor"
            )
        return gather_slices([tensor], _resolved(op, average), name, process_set)[0]
    return grouped_allreduce(
        [tensor],
        average,
        device_dense,
        device_sparse,
        compression,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        name,
        ignore_name_scope,
    )[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
    ignore_name_scope: bool = False,
) -> list[tf.Tensor]:
    """Reduce several tensors over the ranks, none before all of them are ready on all ranks."""
    on_host(device_dense)
    on_host(device_sparse)
    if any(isinstance(each, tf.IndexedSlices) for each in tensors):
        raise ValueError(
            "grouped_allreduce takes dense tensors; hvd.allreduce takes tf.IndexedSlices, one by one"
        )
    reduction, given = _resolved(op, average), as_tensors(tensors, "allreduce", name)
    name = name_in_graph("allreduce", name, ignore_name_scope)
    narrow = [compression.compress(_widened(each)) for each in given]

    def reduce(name: str | None, sent: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        def on_torch(group: list[torch.Tensor]) -> list[torch.Tensor]:
            handle = requests.grouped_allreduce_async(
                group, None, name, reduction, prescale_factor, postscale_factor, process_set
            )
            reduced: list[torch.Tensor] = synchronize(handle)
            return reduced

        return call(on_torch, sent, like(sent))

    def backward(_: Any, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if reduction in (Min, Max, Product):
            raise NotImplementedError(
                "there is no gradient through an allreduce with op=Min, Max or Product; through Sum and Average there is"
            )
        return reduce(gradient_name(name), gradients)

    sent = [each for each, _ in narrow]
    received = differentiable(lambda *group: reduce(name, group), backward, sent)
    return _restored(received, given, [ctx for _, ctx in narrow], compression)


def _widened(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor of uint16, which torch does not reduce, in int32."""
    return tf.cast(tensor, tf.int32) if tensor.dtype == tf.uint16 else tensor


def _restored(
    reduced: Sequence[tf.Tensor],
    given: Sequence[tf.Tensor],
    contexts: Sequence[Any],
    compression: type[Compressor],
) -> list[tf.Tensor]:
    """Return reduced tensors in the types of the given ones."""
    wide = [compression.decompress(each, ctx) for each, ctx in zip(reduced, contexts, strict=True)]
    return [
        tf.cast(each, tf.uint16) if like.dtype == tf.uint16 else each
        for each, like in zip(wide, given, strict=True)
    ]


def _resolved(op: int | None, average: bool | None) -> int:
    """The number of a reduction, from `op` and Horovod's older `average`."""
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        return Average if average else Sum
    return Average if op is None else op


def gather_slices(
    slices: Sequence[tf.IndexedSlices], op: int, name: str | None, process_set: ProcessSet
) -> list[tf.IndexedSlices]:
    """The slices of all ranks, one after the other, divided by the number of ranks for op=Average."""
    if op not in (Sum, Average):
        raise ValueError(
            "tf.IndexedSlices are combined with op=Average or op=Sum; others need dense tensors (sparse_as_dense=True)"
        )
    parts = [part for each in slices for part in (each.values, each.indices)]
    gathered = grouped_allgather(parts, name, process_set=process_set)
    size = process_set.size() if op == Average else 1
    return [
        tf.IndexedSlices(values / tf.cast(size, values.dtype), indices, each.dense_shape)
        for each, values, indices in zip(slices, gathered[::2], gathered[1::2], strict=True)
    ]


# ---- reduce-scatter ----


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce `tensor` over the ranks and keep this rank's rows; the first ranks get one more if need be."""
    return grouped_reducescatter(
        [tensor], device_dense, compression, op, process_set, prescale_factor, postscale_factor, name
    )[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Reduce several tensors over the ranks and keep this rank's rows of each."""
    on_host(device_dense)
    given = as_tensors(tensors, "reducescatter", name)
    name = name_in_graph("reducescatter", name)
    narrow = [compression.compress(_widened(each)) for each in given]

    def scatter(*group: tf.Tensor) -> list[tf.Tensor]:
        def on_torch(group: list[torch.Tensor]) -> list[torch.Tensor]:
            handle = requests.grouped_reducescatter_async(
                group, name, op, process_set, prescale_factor, postscale_factor
            )
            kept: list[torch.Tensor] = synchronize(handle)
            return kept

        return call(on_torch, group, any_rows(group))

    def backward(given: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if op not in (Sum, Average):
            raise NotImplementedError("gradients flow through a reducescatter with op=Sum or Average only")

        def on_torch(group: list[torch.Tensor]) -> list[torch.Tensor]:
            factor = prescale_factor * postscale_factor * (process_set.size() if op == Sum else 1)
            scaled = [each * factor for each in group]
            return list(
                synchronize(requests.grouped_allgather_async(scaled, gradient_name(name), process_set))
            )

        return call(on_torch, gradients, like(given))

    kept = differentiable(scatter, backward, [each for each, _ in narrow])
    return _restored(kept, given, [ctx for _, ctx in narrow], compression)
