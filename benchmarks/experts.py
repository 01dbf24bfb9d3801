"""Compare expert parallelism with torch's functional all-to-all over Gloo, as torchtitan uses it.

    python -m benchmarks.experts [--ranks 2]

Each rank has one thread.  The implementations alternate in one run.

- `exchange`: an uneven all-to-all of rows of 512 fp32 numbers, forward and backward.
- `training step`: a Mixtral with 4 experts, 2 of which process each token, in fp32, with 1 or 2 samples of 256 tokens
  per rank (forward and backward pass, fused AdamW).  The torch implementation trains the same model with torchtitan's
  operations, and reduces the gradients of all weights except the experts' weights with DistributedDataParallel.
- `without communication`: two copies of the rows instead of an exchange, or a training step in which each rank sends
  its own rows to its own experts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.parallel import DistributedDataParallel

import farandole
from benchmarks.language_steps import adamw, local_step, our_step, random_batch
from benchmarks.measure import records_table, save, seconds_per_round, start
from farandole._startup import keep_freed_memory
from farandole.models.mixtral import MixtralConfig, build_mixtral
from farandole.models.moe import Experts, Products
from farandole.parallel import expert
from farandole.parallel.axes import AxisCommunicator
from farandole.parallel.expert import exchange_rows
from farandole.plan import Plan

CONFIG = MixtralConfig(
    vocabulary=8192, layers=4, heads=8, width=512, inner=1024, kv_heads=4, experts=4, top=2
)
LENGTH, ROUNDS = 256, 9
SAMPLES = (2, 1)
"""The numbers of samples per rank in a training step."""
SENT = (256, 1024, 4096)
"""The numbers of rows that a rank sends in an exchange."""

OURS, GLOO, LIMIT = "farandole", "torch over Gloo", "without communication"


class TorchMixture(nn.Module):
    """A mixture of experts in plain torch with the steps of torchtitan's `MoE` and `ExpertParallel`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, own = group, CONFIG.experts // group.size()
        self.gate = nn.Linear(CONFIG.width, CONFIG.experts, bias=False)
        self.w1, self.w3 = (
            nn.Parameter(torch.randn(own, CONFIG.inner, CONFIG.width) * 0.02) for _ in range(2)
        )
        self.w2 = nn.Parameter(torch.randn(own, CONFIG.width, CONFIG.inner) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, positions, width) to the same shape."""
        tokens = x.flatten(0, 1)
        scores, chosen = self.gate(tokens).float().softmax(1).topk(CONFIG.top, dim=1)
        scores = scores / scores.sum(1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=CONFIG.experts)
        outputs = self.exchange(tokens[order // CONFIG.top], counts)
        weighted = outputs * scores.flatten()[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, order // CONFIG.top, weighted).view_as(x)

    def exchange(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' outputs for `rows`, which are sorted by expert."""
        size = self.group.size()
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts, group=self.group)
        sent = counts.view(size, -1).sum(1).tolist()
        received = incoming.view(size, -1).sum(1).tolist()
        arrived = all_to_all_single_autograd(rows, received, sent, self.group)
        numbers = torch.arange(len(self.w1)).repeat(size).repeat_interleave(incoming)
        order = numbers.argsort(stable=True)
        parts = arrived[order].split(incoming.view(size, -1).sum(0).tolist())
        outputs = torch.cat([self.compute(part, expert) for expert, part in enumerate(parts)])
        unsorted = torch.empty_like(outputs).index_copy(0, order, outputs)
        return all_to_all_single_autograd(unsorted, sent, received, self.group)

    def compute(self, rows: Tensor, expert: int) -> Tensor:
        """Return the output of one expert."""
        hidden = F.silu(rows @ self.w1[expert].T) * (rows @ self.w3[expert].T)
        return hidden @ self.w2[expert].T


class TorchBlock(nn.Module):
    """A Mixtral block in plain torch."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        width, self.head_width = CONFIG.width, CONFIG.width // CONFIG.heads
        self.norm_attention, self.norm_experts = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        shared = CONFIG.kv_heads * self.head_width
        self.key, self.value = nn.Linear(width, shared, bias=False), nn.Linear(width, shared, bias=False)
        self.experts = TorchMixture(group)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Map (batch, positions, width) to the same shape."""
        normed = self.norm_attention(x)
        query, key, value = (
            project(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        query, key = (
            torch.view_as_real(torch.view_as_complex(each.unflatten(-1, (-1, 2))) * rotation).flatten(-2)
            for each in (query, key)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.experts(self.norm_experts(x))
        return result


class TorchMixtral(nn.Module):
    """The same Mixtral as farandole's, in plain torch."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CONFIG.vocabulary, CONFIG.width)
        self.blocks = nn.ModuleList([TorchBlock(group) for _ in range(CONFIG.layers)])
        self.norm = nn.RMSNorm(CONFIG.width, 1e-5)
        self.head = nn.Linear(CONFIG.width, CONFIG.vocabulary, bias=False)
        pairs = CONFIG.width // CONFIG.heads // 2
        angles = torch.outer(torch.arange(LENGTH), 1e4 ** -(torch.arange(pairs) / pairs))
        self.register_buffer("rotation", torch.polar(torch.ones_like(angles), angles))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, positions) to logits."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.rotation)
        result: Tensor = self.head(self.norm(x))
        return result


def torch_step(batch: tuple[Tensor, Tensor], group: dist.ProcessGroup) -> Callable[[], Any]:
    """Return a training step in plain torch."""
    torch.manual_seed(0)
    model = TorchMixtral(group)
    split = [name for name, _ in model.named_parameters() if name.rpartition(".")[2] in ("w1", "w2", "w3")]
    ignored = [*split, "rotation"]  # DistributedDataParallel cannot broadcast complex buffers
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    optimizer = adamw(model)
    own = [parameter for name, parameter in model.named_parameters() if name in split]

    def step() -> float:
        logits = ddp(batch[0])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        loss.backward()
        for parameter in own:  # the sum over all ranks' rows becomes the mean, as for the other weights
            assert parameter.grad is not None
            parameter.grad /= group.size()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def compute_own_rows(model: nn.Module, ranks: int) -> None:
    """Let each rank send its rows to its own experts, without communication."""

    def keep_rows(rows: Tensor, counts: Tensor, products: Products, _: Any) -> tuple[Tensor, None]:
        return products(rows, counts.view(-1, ranks).sum(1)), None

    for module in model.modules():
        if isinstance(module, Experts):
            module.exchange = keep_rows


def exchanges(count: int, comm: Any, group: dist.ProcessGroup) -> dict[str, Callable[[], Any]]:
    """Return an uneven exchange of `count` rows, forward and backward, for each implementation."""
    size, rank = comm.size, comm.rank
    axis = AxisCommunicator(range(size), rank, comm)
    shares = [[(source + target) % size + 1 for target in range(size)] for source in range(size)]
    unit = count // sum(shares[0])
    sent = [unit * share for share in shares[rank]]
    received = [unit * shares[source][rank] for source in range(size)]
    rows = torch.randn(sum(sent), CONFIG.width, requires_grad=True)
    gradient = torch.randn(sum(received), CONFIG.width)

    def ours() -> None:
        torch.autograd.grad(exchange_rows(rows, sent, received, axis)[0], rows, gradient)

    def gloo() -> None:
        torch.autograd.grad(all_to_all_single_autograd(rows, received, sent, group), rows, gradient)

    target = torch.empty(sum(sent), CONFIG.width)

    def copy() -> None:
        for _ in range(2):
            target.copy_(rows.detach())

    return {OURS: ours, GLOO: gloo, LIMIT: copy}


def row(what: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return one row of the table: median times, and the median, lowest and highest ratio within a round."""
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
    build = partial(build_mixtral, CONFIG)
    keep_freed_memory()  # as `farandole train` does, for all implementations
    with farandole.init() as runtime:
        comm, size = runtime.comm, runtime.size
        group = dist.new_group(list(range(size)), backend="gloo")
        rows = [
            row(
                f"exchange of {count} rows",
                seconds_per_round(exchanges(count, comm, group), comm.barrier, ROUNDS, calls=20),
            )
            for count in SENT
        ]
        generator = torch.Generator().manual_seed(runtime.rank)
        for samples in SAMPLES:
            batch = random_batch(CONFIG.vocabulary, samples, LENGTH, generator)
            steps = {
                OURS: our_step(build, Plan(expert=size), batch),
                GLOO: torch_step(batch, group),
                LIMIT: local_step(
                    build, expert.apply, Plan(expert=size), comm, batch, partial(compute_own_rows, ranks=size)
                ),
            }
            found = seconds_per_round(steps, comm.barrier, ROUNDS)
            rows.append(row(f"training step, {samples * LENGTH} tokens", found))
        if runtime.rank == 0:
            print(records_table(rows))
            print(f"results written to {save(f'experts-{size}', {'ranks': size, 'rows': rows})}")


if __name__ == "__main__":
    start(__doc__ or "", "benchmarks.experts", run_rank, pin=True)
