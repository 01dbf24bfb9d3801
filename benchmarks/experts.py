"""Compare expert parallelism with torch's functional all-to-all over Gloo, as torchtitan uses it.

    python -m benchmarks.experts [--ranks 2]

Each rank has one thread.  The implementations take turns in one run.

- `exchange`: an uneven all-to-all of rows of 512 fp32 numbers, forward and backward.
- `training step`: a Mixtral with 4 experts of which 2 are selected, in fp32, with 2 samples of 256 tokens per rank (forward
  and backward pass, fused AdamW).  The implementation in torch has the same model, computes the same experts, and reduces the
  gradients of the other weights with DistributedDataParallel.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.parallel import DistributedDataParallel

import farandole
from benchmarks.measure import records_table, save, start
from farandole.layout import chunk
from farandole.models.mixtral import MixtralConfig, build_mixtral
from farandole.models.moe import Experts, Meanwhile, Products
from farandole.parallel.expert import exchange_rows
from farandole.plan import Plan

CONFIG = MixtralConfig(
    vocabulary=8192, layers=4, heads=8, width=512, inner=1024, kv_heads=4, experts=4, top=2
)
ROWS, LENGTH, ROUNDS = 2, 256, 9
SENT = (256, 1024, 4096)
"""The numbers of rows that a rank sends in an exchange."""

OURS, GLOO = "farandole", "torch over Gloo"


class TorchExchange:
    """Exchanges rows between ranks with torch's functional collectives."""

    def __init__(self, experts: int, group: dist.ProcessGroup) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.ranges = [chunk(experts, self.size, rank) for rank in range(self.size)]

    def __call__(
        self, rows: Tensor, counts: Tensor, products: Products, meanwhile: Meanwhile | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the experts' outputs for `rows`, which are sorted by expert."""
        first, end = self.ranges[self.rank]
        every = [torch.empty_like(counts) for _ in range(self.size)]
        dist.all_gather(every, counts, group=self.group)
        table = torch.stack(every)
        sent = [int(counts[a:b].sum()) for a, b in self.ranges]
        own = table[:, first:end]
        received = own.sum(1).tolist()
        arrived = all_to_all_single_autograd(rows, received, sent, self.group)
        numbers = torch.arange(end - first).repeat(self.size).repeat_interleave(own.flatten())
        order = numbers.argsort(stable=True)
        outputs = products(arrived[order], own.sum(0))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return all_to_all_single_autograd(outputs[back], sent, received, self.group), None


def torch_step(batch: tuple[Tensor, Tensor], group: dist.ProcessGroup) -> Callable[[], Any]:
    """Return a training step in plain torch."""
    torch.manual_seed(0)
    model = build_mixtral(CONFIG)
    split = []
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            exchange = TorchExchange(module.count, group)
            first, end = exchange.ranges[exchange.rank]
            module.exchange = exchange
            for key in ("gate_up", "down"):
                setattr(module, key, nn.Parameter(getattr(module, key).detach()[first:end].clone()))
                split.append(f"{name}.{key}")
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, split)
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    own = [parameter for name, parameter in model.named_parameters() if name in split]

    def step() -> float:
        total, count = ddp(batch[0], None, batch[1])
        (total / count).backward()
        for parameter in own:  # the sum over all ranks' rows becomes the mean, as for the other weights
            assert parameter.grad is not None
            parameter.grad /= group.size()
        optimizer.step()
        optimizer.zero_grad()
        return float(total.detach())

    return step


def our_step(batch: tuple[Tensor, Tensor], ranks: int) -> Callable[[], Any]:
    """Return a training step of farandole."""
    torch.manual_seed(0)
    model = build_mixtral(CONFIG)
    engine = farandole.parallelize(model, Plan(expert=ranks))
    optimizer = engine.optimizer(torch.optim.AdamW(model.parameters(), 1e-4, fused=True))

    def step() -> float:
        result = engine.forward_backward(
            [batch], lambda output, _: output, inputs=lambda each: (each[0], None, each[1])
        )
        optimizer.step()
        optimizer.zero_grad()
        return result.loss

    return step


def exchanges(count: int, comm: Any, group: dist.ProcessGroup) -> dict[str, Callable[[], Any]]:
    """Return the uneven exchanges of `count` rows, forward and backward, of each implementation."""
    size, rank = comm.size, comm.rank
    shares = [[(source + target) % size + 1 for target in range(size)] for source in range(size)]
    unit = count // sum(shares[0])
    sent = [unit * share for share in shares[rank]]
    received = [unit * shares[source][rank] for source in range(size)]
    rows = torch.randn(sum(sent), CONFIG.width, requires_grad=True)
    gradient = torch.randn(sum(received), CONFIG.width)

    def ours() -> None:
        exchange_rows(rows, sent, received, comm)[0].backward(gradient)

    def gloo() -> None:
        all_to_all_single_autograd(rows, received, sent, group).backward(gradient)

    return {OURS: ours, GLOO: gloo}


def measure(
    calls: dict[str, Callable[[], Any]], barrier: Callable[[], Any], repeats: int
) -> dict[str, list[float]]:
    """Return the seconds per call of each implementation in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ROUNDS + 1):
        for name, call in calls.items():
            barrier()
            begun = time.perf_counter()
            for _ in range(repeats):
                call()
            barrier()
            if number:
                seconds[name].append((time.perf_counter() - begun) / repeats)
    return seconds


def row(what: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return one row of the table: medians, and the ratio in the same round with its spread."""
    ratios = sorted(gloo / ours for ours, gloo in zip(seconds[OURS], seconds[GLOO], strict=True))
    return {
        "measured": what,
        **{f"{name}, ms": round(1e3 * statistics.median(found), 3) for name, found in seconds.items()},
        "x Gloo": round(statistics.median(ratios), 2),
        "lowest": round(ratios[0], 2),
        "highest": round(ratios[-1], 2),
    }


def run_rank() -> None:
    """Measure as one rank; rank 0 prints the report."""
    torch.set_num_threads(1)
    with farandole.init() as runtime:
        comm, size = runtime.comm, runtime.size
        group = dist.new_group(list(range(size)), backend="gloo")
        rows = [
            row(f"exchange of {count} rows", measure(exchanges(count, comm, group), comm.barrier, 20))
            for count in SENT
        ]
        generator = torch.Generator().manual_seed(runtime.rank)
        tokens = torch.randint(0, CONFIG.vocabulary, (ROWS, LENGTH + 1), generator=generator)
        batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        steps = {OURS: our_step(batch, size), GLOO: torch_step(batch, group)}
        rows.append(row("training step", measure(steps, comm.barrier, 1)))
        if runtime.rank == 0:
            print(records_table(rows))
            print(f"results written to {save(f'experts-{size}', {'ranks': size, 'rows': rows})}")


if __name__ == "__main__":
    start(__doc__ or "", "benchmarks.experts", run_rank, pin=True)
