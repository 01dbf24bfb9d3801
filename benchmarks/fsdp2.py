"""Compare the training speed of FSDP2 (`fully_shard`) over farandole and over Gloo, with an MLP.

    python -m benchmarks.fsdp2 [--ranks 2]

The MLP has eight 1024 x 1024 layers (8.4 M parameters) and is trained in fp32 with SGD and 16 samples per rank.  In the
same processes, one copy of the model is sharded with each backend, and the copies alternate after every step.  The
collectives of torch's `fake` backend do nothing, so this backend shows the limit for FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import farandole
from benchmarks.measure import human_seconds, markdown_table, save, start, take_turns

WIDTH, LAYERS, BATCH, TURNS = 1024, 8, 16, 15


def stepper(group: dist.ProcessGroup | None) -> Callable[[], None]:
    """Return a training step of the MLP, sharded over `group`; without a group, each rank trains the full model."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))
    if group is not None:
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def run_rank() -> None:
    """Measure as one rank; rank 0 prints the report."""
    torch.set_num_threads(1)
    with farandole.init() as runtime:
        implementations = {
            "FSDP2 over farandole": stepper(runtime.comm.group),
            "FSDP2 over Gloo": stepper(dist.new_group(backend="gloo")),
            "FSDP2, no communication": stepper(dist.new_group(backend="fake")),
            "no FSDP2, no communication": stepper(None),
        }
        seconds = take_turns(implementations, runtime.comm.barrier, TURNS, 1)
        if runtime.rank == 0:
            gloo = seconds["FSDP2 over Gloo"]
            rows = [
                [name, human_seconds(s), f"{1 / s:.1f}", f"{gloo / s:.1f}"] for name, s in seconds.items()
            ]
            print(markdown_table(["8.4 M parameter MLP", "step", "steps/s", "x Gloo"], rows))
            print(
                f"results written to {save(f'fsdp2-{runtime.size}', {'ranks': runtime.size, 'seconds': seconds})}"
            )


if __name__ == "__main__":
    start(__doc__, "benchmarks.fsdp2", run_rank, pin=False)
