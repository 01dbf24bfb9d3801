"""Compare training speeds for the default preset: farandole on several ranks, farandole on one rank, and DDP.

    python -m benchmarks.training [--ranks 2]

All implementations use one thread per rank and the same model, batch, precision and optimizer, and alternate in one
run.  Each rank processes an equal share of the preset's batch.  The result is the number of tokens per second of all
ranks together.  For `one rank`, rank 0 trains on the full batch while the other ranks sleep.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import farandole
from benchmarks.measure import markdown_table, save, start, take_turns
from farandole.comm import Communicator
from farandole.data.sampler import Sampler
from farandole.data.text import Text
from farandole.launch.runtime import Runtime
from farandole.models.gpt import build_gpt
from farandole.models.loss import next_token_loss
from farandole.plan import Precision
from farandole.train.config import TrainConfig, load_config
from farandole.train.hardware import choose_precision
from farandole.train.text import TextTask, open_text
from farandole.train.trainer import Trainer, build_optimizer

TURNS, STEPS = 11, 4


def ddp_stepper(config: TrainConfig, text: Text, precision: str, group: Any) -> Callable[[], None]:
    """Return a training step with DistributedDataParallel."""
    device = torch.device("cpu")
    torch.manual_seed(config.seed)
    replica = DistributedDataParallel(
        build_gpt(config.model.gpt()), process_group=group, gradient_as_bucket_view=True
    )
    optimizer = build_optimizer(replica.module, config.optimizer)
    sampler = Sampler(text.train.samples, config.seed)

    def step() -> None:
        samples = sampler.next(config.batch, dist.get_rank(group), dist.get_world_size(group))
        windows = torch.from_numpy(text.train.read(samples))
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = next_token_loss(replica(windows[:, :-1]), windows[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(replica.parameters(), config.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def implementations_of(
    runtime: Runtime, config: TrainConfig, text: Text, precision: Precision
) -> dict[str, Callable[[], Any]]:
    """Return the implementations that alternate on this rank."""
    groups = [dist.new_group([rank]) for rank in range(runtime.size)]
    alone_comm, task = Communicator(groups[runtime.rank]), TextTask(config, text=text)
    alone = Trainer(config, task, precision, alone_comm, runtime.device)
    together = Trainer(config, task, precision, runtime.comm, runtime.device)
    return {
        "one rank": alone.step if runtime.rank == 0 else lambda: None,
        "farandole": together.step,
        "DDP over Gloo": ddp_stepper(config, text, precision, dist.new_group(backend="gloo")),
        "DDP over farandole": ddp_stepper(config, text, precision, dist.group.WORLD),
    }


def run_rank() -> None:
    """Measure as one rank; rank 0 prints the report."""
    config = load_config()
    torch.set_num_threads(1)
    with farandole.init() as runtime:
        if runtime.rank == 0:
            open_text(config)  # tokenize once
        runtime.comm.barrier()
        text = open_text(config)
        precision = choose_precision(config.plan.precision, runtime.comm, runtime.device).name
        implementations = implementations_of(runtime, config, text, precision)
        seconds = take_turns(implementations, runtime.comm.barrier, TURNS, STEPS)
        if runtime.rank == 0:
            report(runtime.size, config, precision, seconds)


def report(ranks: int, config: TrainConfig, precision: str, seconds: dict[str, float]) -> None:
    """Print the table and write JSON."""
    per_step = config.batch * config.model.context
    one = seconds["one rank"]
    rows = [
        [name, f"{per_step / s:,.0f}", f"{one / s:.2f}", f"{seconds['DDP over Gloo'] / s:.2f}"]
        for name, s in seconds.items()
    ]
    head = [
        f"default preset, {precision}, {ranks} ranks, 1 thread each",
        "tokens/s",
        "x one rank",
        "x DDP over Gloo",
    ]
    print(markdown_table(head, rows))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {
        "ranks": ranks,
        "precision": precision,
        "tokens_per_step": per_step,
        "seconds": seconds,
        "peak": peak,
    }
    print(f"results written to {save(f'training-{ranks}', result)}")


if __name__ == "__main__":
    start(__doc__, "benchmarks.training", run_rank, pin=True)
