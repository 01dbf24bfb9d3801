"""Compare the training speed of `farandole.horovod` and DDP on the same ranks, with a ResNet-18.

    python -m benchmarks.horovod [--ranks 2]

ResNet-18 (11.7 M parameters) is trained in fp32 with momentum SGD, on 16 images of 64 x 64 pixels per rank, with one
thread per rank.  Each implementation has a copy of the model; the implementations alternate after every step.
With `no communication`, each rank trains alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import farandole.horovod.torch as hvd
from benchmarks.measure import human_seconds, markdown_table, save, start, take_turns
from farandole.models.resnet import build_resnet, resnet_config

BATCH, PIXELS, TURNS = 16, 64, 15


def stepper(prepare: Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]) -> Callable[[], None]:
    """Return a training step of a ResNet-18 that `prepare` has parallelized."""
    torch.manual_seed(0)
    model, optimizer = prepare(build_resnet(resnet_config("resnet18")))
    images, labels = torch.randn(BATCH, 3, PIXELS, PIXELS), torch.randint(1000, (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that all implementations use."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def with_ddp(group: dist.ProcessGroup) -> Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]:
    """Return a function that wraps a model in DDP over `group`, with default settings."""

    def prepare(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        return DistributedDataParallel(model, process_group=group), sgd(model)

    return prepare


def with_horovod(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Prepare a model for training with `hvd.DistributedOptimizer`, with default settings."""
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model, optimizer


def run_rank() -> None:
    """Measure as one rank; rank 0 prints the report."""
    torch.set_num_threads(1)
    hvd.init()
    world = dist.group.WORLD
    assert world is not None
    implementations = {
        "farandole.horovod": stepper(with_horovod),
        "DDP over Gloo": stepper(with_ddp(dist.new_group(backend="gloo"))),
        "DDP over farandole": stepper(with_ddp(world)),
        "no communication": stepper(lambda model: (model, sgd(model))),
    }
    seconds = take_turns(implementations, lambda: dist.barrier(world), TURNS, 1)
    if hvd.rank() == 0:
        result = {"ranks": hvd.size(), "images_per_step": BATCH * hvd.size(), "seconds": seconds}
        print(table(result))
        print(f"results written to {save(f'horovod-{hvd.size()}', result)}")
    hvd.shutdown()


def table(result: dict) -> str:
    """Return a table with the step time and the images per second over all ranks."""
    seconds, images = result["seconds"], result["images_per_step"]
    rows = [
        [what, human_seconds(s), f"{images / s:.1f}", f"{seconds['DDP over Gloo'] / s:.2f}"]
        for what, s in seconds.items()
    ]
    return markdown_table(["ResNet-18", "step", "images/s", "x DDP over Gloo"], rows)


if __name__ == "__main__":
    start(__doc__, "benchmarks.horovod", run_rank, pin=False)
