"""Horovod 0.28's TensorFlow 2 API: `import farandole.horovod.tensorflow as hvd`."""

from typing import NoReturn

try:
    import tensorflow as _tensorflow  # noqa: F401
except ImportError as _error:
    raise ImportError(
        "farandole.horovod.tensorflow requires TensorFlow 2: pip install 'farandole[tensorflow]'"
    ) from _error

from farandole.horovod import basics
from farandole.horovod.basics import *  # noqa: F403
from farandole.horovod.compression import Compression
from farandole.horovod.elastic import HostsUpdatedInterrupt
from farandole.horovod.process_sets import ProcessSet, global_process_set
from farandole.horovod.requests import HorovodInternalError
from farandole.horovod.tensorflow.functions import (
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from farandole.horovod.tensorflow.gradients import (
    DistributedGradientTape,
    DistributedOptimizer,
    PartialDistributedGradientTape,
)
from farandole.horovod.tensorflow.operations import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
)
from farandole.horovod.tensorflow.sync_batch_norm import SyncBatchNormalization


def __getattr__(name: str) -> NoReturn:
    """Raise AttributeError; for an unimplemented Horovod attribute, suggest an alternative."""
    if name == "elastic":
        raise AttributeError(
            "horovod.tensorflow.elastic is not implemented; elastic training requires PyTorch (horovod.torch.elastic)"
        )
    if name.endswith("Hook"):
        raise AttributeError(
            f"{name} requires a TensorFlow 1 session, which is not supported; use hvd.broadcast_variables"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    *basics.__all__,
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "global_process_set",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]
