"""Training a ResNet on one synthetic batch with PyTorch, by each of the ways to reduce its gradients."""

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
from farandole.bench.setup import BenchError, TrainingSetup, one_of
from farandole.launch.runtime import Runtime
from farandole.models.resnet import build_resnet, resnet_config
from farandole.parallel.engine import Engine

HOROVOD = "farandole.horovod.torch"


def nothing() -> None:
    """What most engines do at their end."""


@dataclass
class Job:
    """What every engine trains: model, optimizer and the one batch, which is used again and again.

    Images are kept with channels last: on a CPU that makes bf16 about 1.4 times as fast as channels first
    (ResNet-50, AMX), and fp32 no slower.  The weights are not: convolutions arrange those as they need them.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    images: Tensor
    targets: Tensor
    bf16: bool
    fp16_allreduce: bool
    runtime: Runtime
    at_end: Callable[[], None] = nothing

    def backward(self, model: nn.Module) -> None:
        """Gradients of the loss of the batch; `model` is the job's, or a wrapper of it."""
        with torch.autocast(self.images.device.type, torch.bfloat16, enabled=self.bf16):
            loss = F.cross_entropy(model(self.images), self.targets)
        loss.backward()


Step = Callable[[], None]


def alone(job: Job) -> Step:
    """No communication."""

    def step() -> None:
        job.optimizer.zero_grad()
        job.backward(job.model)
        job.optimizer.step()

    return step


def farandole(job: Job) -> Step:
    """Our engine."""
    comm = job.runtime.comm
    replica = Engine(job.model, HalfCommunicator(comm.group) if job.fp16_allreduce else comm)

    def step() -> None:
        replica.zero_grad()
        job.backward(job.model)
        replica.synchronize()
        job.optimizer.step()

    return step


def ddp(job: Job) -> Step:
    """torch's DistributedDataParallel over the group of the runtime."""
    return _ddp(job, job.runtime.comm.group)


def ddp_gloo(job: Job) -> Step:
    """torch's DistributedDataParallel over Gloo."""
    return _ddp(job, dist.new_group(backend="gloo"))


def _ddp(job: Job, group: dist.ProcessGroup) -> Step:
    # DDP gives gradients the strides of their weights and warns where the convolutions return others
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
    """The DistributedOptimizer of our Horovod interface."""
    hvd = importlib.import_module(HOROVOD)
    hvd.init()
    job.at_end = hvd.shutdown
    hvd.broadcast_parameters(job.model.state_dict(), root_rank=0)
    job.optimizer = hvd.DistributedOptimizer(
        job.optimizer,
        named_parameters=job.model.named_parameters(),
        compression=hvd.Compression.fp16 if job.fp16_allreduce else hvd.Compression.none,
    )
    return alone(job)  # the optimizer reduces


ENGINES: dict[str, Callable[[Job], Step]] = {
    "farandole": farandole,
    "ddp": ddp,
    "ddp-gloo": ddp_gloo,
    "horovod": horovod,
}


class TorchTraining:
    """One rank's training by one engine."""

    def __init__(self, job: Job, make: Callable[[Job], Step]) -> None:
        self.step = make(job)
        self.close = job.at_end
        self._device = job.images.device

    def finish(self) -> None:
        """Wait until the device has done what `step` asked of it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class PyTorch:
    """The framework "pytorch"."""

    def check(self, setup: TrainingSetup) -> None:
        """Raise `BenchError` for an engine that is not here."""
        one_of("--engine", setup.engine, ENGINES)
        if setup.engine == "horovod" and not _is_there(HOROVOD):
            others = ", ".join(name for name in ENGINES if name != "horovod")
            raise BenchError(
                f"--engine horovod needs {HOROVOD}, which this installation lacks; there are {others}"
            )

    def build(self, setup: TrainingSetup, runtime: Runtime, engine: str) -> TorchTraining:
        """A training of this rank; the batch differs between ranks, the initial weights do not."""
        config, device = resnet_config(setup.model), runtime.device
        torch.manual_seed(0)
        model = build_resnet(config).to(device)
        generator = torch.Generator().manual_seed(1 + runtime.rank)
        shape = setup.batch_size, 3, setup.image_size, setup.image_size
        images = torch.randn(shape, generator=generator)
        targets = torch.randint(config.classes, (setup.batch_size,), generator=generator)
        job = Job(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            images=images.to(device, memory_format=torch.channels_last),
            targets=targets.to(device),
            bf16=setup.precision == "bf16",
            fp16_allreduce=setup.fp16_allreduce,
            runtime=runtime,
        )
        return TorchTraining(job, alone if engine == "alone" else ENGINES[engine])


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
