"""Horovod 0.28's TensorFlow 2 API: `import farandole.horovod.tensorflow as hvd`."""

from typing import NoReturn

try:
    import tensorflow as _tensorflow  # noqa: F401
except ImportError as _error:
    raise ImportError(
        "farandole.horovod.tensorflow requires TensorFlow 2: pip install 'farandole[tensorflow]'"
    ) from _error

from farandole.horovod.basics import (
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from farandole.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from farandole.horovod.process_sets import ProcessSet, global_process_set
from farandole.horovod.tensorflow.compression import Compression
from farandole.horovod.tensorflow.functions import (
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from farandole.horovod.tensorflow.gradients import DistributedGradientTape, PartialDistributedGradientTape
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
from farandole.horovod.tensorflow.optimizer import DistributedOptimizer
from farandole.horovod.tensorflow.sync_batch_norm import SyncBatchNormalization


def __getattr__(name: str) -> NoReturn:
    """Raise AttributeError.  For unimplemented Horovod attributes, the message names the alternative."""
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
    "add_process_set",
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
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
