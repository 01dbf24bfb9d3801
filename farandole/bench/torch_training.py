"""Train a ResNet on one synthetic batch in PyTorch, with several implementations of the gradient reduction."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from farandole.bench.half import HalfCommunicator
from farandole.bench.options import BenchError, check_choice
from farandole.bench.setup import TrainingSetup
from farandole.launch.runtime import Runtime
from farandole.models.resnet import build_resnet, resnet_config
from farandole.parallel.engine import Engine

HOROVOD = "farandole.horovod.torch"


def do_nothing() -> None:
    """Do nothing; this function is the default of `Job.at_end`."""


@dataclass
class Job:
    """The model, the optimizer, and the synthetic batch on which all steps train.

    The images are in channels-last format.  On a CPU with AMX, this format makes ResNet-50 about 1.4 times as fast
    in bf16, and no slower in fp32.  The weights keep their format, because convolutions reorder them anyway.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    images: Tensor
    targets: Tensor
    autocast: bool
    fp16_allreduce: bool
    runtime: Runtime
    at_end: Callable[[], None] = do_nothing

    def backward(self, model: nn.Module) -> None:
        """Compute the gradients of the loss on the batch.

        Args:
            model: the job's model, or a wrapper around it such as `DistributedDataParallel`.
        """
        with torch.autocast(self.images.device.type, torch.bfloat16, enabled=self.autocast):
            loss = F.cross_entropy(model(self.images), self.targets)
        loss.backward()


Step = Callable[[], None]


def alone(job: Job) -> Step:
    """Return a function that trains for one step without communication."""

    def step() -> None:
        job.optimizer.zero_grad()
        job.backward(job.model)
        job.optimizer.step()

    return step


def farandole(job: Job) -> Step:
    """Return a function that trains for one step and reduces the gradients with farandole's `Engine`."""
    comm = job.runtime.comm
    replica = Engine(job.model, HalfCommunicator(comm.group) if job.fp16_allreduce else comm)

    def step() -> None:
        replica.zero_grad()
        job.backward(job.model)
        replica.synchronize()
        job.optimizer.step()

    return step


def ddp(job: Job) -> Step:
    """Return a function that trains for one step with `DistributedDataParallel` over the farandole backend."""
    return _ddp(job, job.runtime.comm.group)


def ddp_gloo(job: Job) -> Step:
    """Return a function that trains for one step with `DistributedDataParallel` over Gloo."""
    return _ddp(job, dist.new_group(backend="gloo"))


def _ddp(job: Job, group: dist.ProcessGroup) -> Step:
    # DDP gives gradients the strides of the weights, and warns if convolutions return other strides
    job.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in the stubs
    replica = DistributedDataParallel(job.model, process_group=group, gradient_as_bucket_view=True)
    if job.fp16_allreduce:
        replica.register_comm_hook(group, fp16_compress_hook)

    def step() -> None:
        job.optimizer.zero_grad()
        job.backward(replica)
        job.optimizer.step()

    return step


def horovod(job: Job) -> Step:
    """Return a function that trains for one step with the `DistributedOptimizer` of the Horovod interface."""
    hvd = importlib.import_module(HOROVOD)
    hvd.init()
    job.at_end = hvd.shutdown
    hvd.broadcast_parameters(job.model.state_dict(), root_rank=0)
    job.optimizer = hvd.DistributedOptimizer(
        job.optimizer,
        named_parameters=job.model.named_parameters(),
        compression=hvd.Compression.fp16 if job.fp16_allreduce else hvd.Compression.none,
    )
    return alone(job)  # the optimizer reduces the gradients


IMPLEMENTATIONS: dict[str, Callable[[Job], Step]] = {
    "farandole": farandole,
    "ddp": ddp,
    "ddp-gloo": ddp_gloo,
    "horovod": horovod,
}


class TorchTraining:
    """A training run on one rank with one implementation."""

    def __init__(self, job: Job, make: Callable[[Job], Step]) -> None:
        self.step = make(job)
        self.close = job.at_end
        self._device = job.images.device

    def finish(self) -> None:
        """Synchronize the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class PyTorch:
    """The framework "pytorch"."""

    def check(self, setup: TrainingSetup) -> None:
        """Raise BenchError if the requested implementation is unknown or not installed."""
        check_choice("--implementation", setup.implementation, IMPLEMENTATIONS)
        if setup.implementation == "horovod" and not _is_there(HOROVOD):
            others = ", ".join(name for name in IMPLEMENTATIONS if name != "horovod")
            raise BenchError(
                f"--implementation horovod needs {HOROVOD}, which is not installed; use one of {others}"
            )

    def build(self, setup: TrainingSetup, runtime: Runtime, implementation: str) -> TorchTraining:
        """Return this rank's training run.

        Each rank has its own synthetic batch, and all ranks have the same initial weights.
        """
        config, device = resnet_config(setup.model), runtime.device
        torch.manual_seed(0)
        model = build_resnet(config).to(device)
        generator = torch.Generator().manual_seed(1 + runtime.rank)
        shape = setup.micro_batch, 3, setup.image_size, setup.image_size
        images = torch.randn(shape, generator=generator)
        targets = torch.randint(config.classes, (setup.micro_batch,), generator=generator)
        job = Job(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            images=images.to(device, memory_format=torch.channels_last),
            targets=targets.to(device),
            autocast=setup.autocast,
            fp16_allreduce=setup.fp16_allreduce,
            runtime=runtime,
        )
        return TorchTraining(job, alone if implementation == "alone" else IMPLEMENTATIONS[implementation])


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
