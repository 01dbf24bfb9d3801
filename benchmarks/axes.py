"""Compare farandole's tensor parallelism with torch's `parallelize_module`.

    python -m benchmarks.axes [--ranks 2]

Each rank has one thread.  The implementations alternate after each training step (forward and backward pass, fused
AdamW).  The model is a GPT with 124 M parameters in fp32, and a batch has 2 samples of 256 tokens.

- `ideal`: each rank computes its part of every sharded matrix, without communication.
- `parallelize_module`: DTensor, with separate projections of queries, keys and values, a vocabulary that is sharded by
  rows, and `loss_parallel`, as in torchtitan.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import farandole
from benchmarks.language_steps import local_step, our_step, random_batch
from benchmarks.measure import records_table, save, seconds_per_round, start
from farandole.models.gpt import GPTConfig, build_gpt
from farandole.parallel import tensor
from farandole.plan import Plan

CONFIG = GPTConfig(vocabulary=50257, context=1024, layers=12, heads=12, width=768, positions="learned")
ROWS, LENGTH, ROUNDS = 2, 256, 7


class Attention(nn.Module):
    """Attention with separate projections, as `parallelize_module` needs."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.head_width = head_width

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, positions, width) to the same shape."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """A GPT-2 block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.norm_attention, self.norm_feed_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, width // config.heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, positions, width) to the same shape."""
        x = x + self.attention(self.norm_attention(x))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm_feed_forward(x))))
        return result


class PlainGPT(nn.Module):
    """The same GPT as farandole's, in plain torch."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, positions) to logits."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x))
        return result


def split_with_torch(model: PlainGPT, mesh: DeviceMesh) -> None:
    """Apply `parallelize_module` as torchtitan does, without sequence parallelism."""
    column, row = ColwiseParallel, RowwiseParallel
    for block in model.blocks:
        plan = {f"attention.{name}": column() for name in ("query", "key", "value")}
        parallelize_module(block, mesh, plan | {"attention.out": row(), "up": column(), "down": row()})
    parallelize_module(
        model,
        mesh,
        {
            "tokens": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        },
    )


def torch_step(mesh: DeviceMesh, batch: tuple[Tensor, Tensor]) -> Callable[[], Any]:
    """Return a training step with `parallelize_module`."""
    torch.manual_seed(0)
    model = PlainGPT(CONFIG)
    split_with_torch(model, mesh)
    split = [p for p in model.parameters() if hasattr(p, "placements")]
    whole = [p for p in model.parameters() if not hasattr(p, "placements")]
    optimizers = [torch.optim.AdamW(each, 1e-4, fused=True) for each in (split, whole)]

    def step() -> float:
        with loss_parallel():
            logits = model(batch[0])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return step


def run_rank() -> None:
    """Measure as one rank; rank 0 prints the report."""
    torch.set_num_threads(1)
    build = partial(build_gpt, CONFIG)
    with farandole.init() as runtime:
        batch = random_batch(CONFIG.vocabulary, ROWS, LENGTH, torch.Generator().manual_seed(0))
        ranks, size = list(range(runtime.size)), runtime.size
        meshes = {
            "parallelize_module over Gloo": DeviceMesh.from_group(
                dist.new_group(ranks, backend="gloo"), "cpu"
            ),
            "parallelize_module over farandole": DeviceMesh.from_group(dist.group.WORLD, "cpu"),
        }
        steps = {
            "ideal": local_step(build, tensor.apply, Plan(tensor=size), runtime.comm, batch),
            f"farandole tensor={size}": our_step(build, Plan(tensor=size), batch),
            f"farandole tensor={size} sequence": our_step(build, Plan(tensor=size, sequence=True), batch),
        } | {name: torch_step(mesh, batch) for name, mesh in meshes.items()}
        seconds = seconds_per_round(steps, runtime.comm.barrier, ROUNDS)
        if runtime.rank == 0:
            rows = summarize(seconds, f"farandole tensor={size}")
            print(records_table(rows))
            print(f"results written to {save(f'axes-{size}', {'ranks': size, 'rows': rows})}")


def summarize(seconds: dict[str, list[float]], ours: str) -> list[dict[str, Any]]:
    """Return a row for each implementation, with the ratios of its times to farandole's times in the same rounds."""
    rows = []
    for name, found in seconds.items():
        ratios = sorted(theirs / own for theirs, own in zip(found, seconds[ours], strict=True))
        rows.append(
            {
                "implementation": name,
                "seconds per step": round(sorted(found)[len(found) // 2], 3),
                "time relative to farandole": round(ratios[len(ratios) // 2], 3),
                "lowest": round(ratios[0], 3),
                "highest": round(ratios[-1], 3),
            }
        )
    return rows


if __name__ == "__main__":
    start(__doc__ or "", "benchmarks.axes", run_rank, pin=True)
