"""Train BERT with 2.5 billion parameters out of core, with 12 GiB of device memory per rank.

    farandole launch --ranks 2 labs/out_of_core_bert.py --device-memory 12GiB
    farandole launch --ranks 2 labs/out_of_core_bert.py --device-memory 12GiB --zero 3 --precision bf16 \\
        --recompute block --offload disk:/var/tmp

The first command stops with an error.  It prints the parameter for which memory ran out, and plans that fit.  The
second command trains the model: weights and gradients are sharded over the ranks, activations are recomputed, and
AdamW's states are stored on disk.

The model has 192 layers of width 1024 and predicts masked tokens.  The default training text is Python's standard
library.  No process holds the full model, because the model is initialized block by block.  See
docs/tutorials/out-of-core.md.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import farandole
from farandole._startup import keep_freed_memory
from farandole.data.masking import MaskedBatches, masking_for
from farandole.data.sampler import Sampler
from farandole.data.text import prepare_text
from farandole.data.tokenizer import MASK
from farandole.data.wording import counted, size
from farandole.memory.disk import Bandwidth, Budget, OffloadError
from farandole.memory.offload_store import measure_bandwidth
from farandole.memory.swap import map_blocks_from
from farandole.memory.tracker import DeviceMemory, OutOfDeviceMemory, by_kind
from farandole.models.bert import BERTConfig, bert_config, block_generator, build_bert, initialize
from farandole.models.loss import next_token_loss
from farandole.plan import Plan
from farandole.planner import (
    Estimate,
    Machine,
    Workload,
    estimate_workload,
    estimated_plans,
    what_fits,
)

SEED = 0


@dataclass(frozen=True)
class Iteration:
    """The result of one iteration on this rank.

    Args:
        loss: the mean loss over all ranks, in nats per masked token.
        passes_s: the duration of the forward and backward passes, in seconds.
        update_s: the duration of the update, in seconds.
        tracked: the number of bytes in use, according to `DeviceMemory`.
        resident: text that states the resident memory of the process.
    """

    loss: float
    passes_s: float
    update_s: float
    tracked: int
    resident: str


def main() -> None:
    """Train the model; if memory runs out, print plans that fit."""
    options = read_options()
    map_blocks_from(1 << 20)  # so that master weights leave no gaps in the heap when they move to the disk
    with farandole.init() as runtime:
        try:
            train(options, runtime)
        except OutOfDeviceMemory as error:
            plans = list(estimated_plans(workload_of(options), runtime.size, device_of(options, runtime)))
            advice = what_fits(plans, runtime.size, options.device_memory)
            raise SystemExit(f"{error}\n{advice}") from None
        except OffloadError as error:
            raise SystemExit(str(error)) from None


def train(options: argparse.Namespace, runtime: farandole.Runtime) -> list[Iteration]:
    """Run all iterations on this rank; rank 0 prints the progress.

    Raises:
        OutOfDeviceMemory: if a rank exceeds the limit on device memory.
    """
    config = config_of(options)
    plan = Plan(
        zero=options.zero, precision=options.precision, recompute=options.recompute, offload=options.offload
    )
    log = Log(Path(options.log) if options.log else None, active=runtime.rank == 0)
    batches = masked_batches(options)
    log_header(log, options, config, plan, runtime)
    bandwidth = None
    if plan.offload_folder is not None and runtime.rank == 0:
        bandwidth = measure_bandwidth(plan.offload_folder)
    with DeviceMemory(options.device_memory, runtime.device) as memory:
        with torch.device("meta"):
            model = build_bert(config)
        memory.watch(model)
        started = time.perf_counter()
        torch.set_default_device(runtime.device)
        try:
            engine = farandole.parallelize(model, plan, initialize=fill_block)
        finally:
            torch.set_default_device(None)
        optimizer = engine.optimizer(torch.optim.AdamW(model.parameters(), lr=options.rate))
        log(f"model initialized in {time.perf_counter() - started:.1f} s; {memory_line(memory)}")
        keep_freed_memory()  # the next step reuses freed memory
        for update in engine.offloaded:
            log(offload_line(update.state.budget(bandwidth), runtime.size))
        results = []
        for number in range(1, options.iterations + 1):
            memory.step = number
            results.append(iterate(engine, optimizer, model, batches, memory, options.batch, runtime))
            log(iteration_line(number, options, results[-1], runtime))
        log(memory_line(memory))
        log(summary(results, options, memory, runtime))
        runtime.comm.barrier()
        engine.close()
    return results


def iterate(
    engine: Any,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    batches: MaskedBatches,
    memory: DeviceMemory,
    batch: int,
    runtime: farandole.Runtime,
) -> Iteration:
    """Run one training step with `batch` samples per rank."""
    assert isinstance(model, nn.Sequential)
    started = time.perf_counter()
    inputs, targets = (
        torch.from_numpy(part).to(runtime.device)
        for part in batches.next(batch * runtime.size, runtime.rank, runtime.size)
    )
    loss, count = model(inputs, None, targets)
    totals = torch.tensor([loss.item(), count], dtype=torch.float64, device=runtime.device)
    runtime.comm.all_reduce(totals)
    # the engine averages gradients over ranks; this factor yields the mean over the masked tokens of all ranks
    engine.backward(loss * (runtime.size / totals[1].item()))
    passed = time.perf_counter()
    engine.clip(1.0)
    optimizer.step()
    engine.zero_grad()
    ended = time.perf_counter()
    mean = (totals[0] / totals[1]).item()
    return Iteration(mean, passed - started, ended - passed, memory.total, resident_note())


def fill_block(name: str, block: nn.Module) -> None:
    """Initialize one block as `build_bert(config, SEED)` does."""
    initialize(block, block_generator(SEED, int(name)))


def config_of(options: argparse.Namespace) -> BERTConfig:
    """Return the configuration `bert-2.5b` with the options applied."""
    return bert_config(
        "bert-2.5b",
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        vocabulary=options.vocabulary,
        context=max(512, options.context),
    )


def workload_of(options: argparse.Namespace) -> Workload:
    """Return the planner's workload.

    The workload slightly overestimates memory, because it computes logits for all tokens instead of masked tokens only.
    """
    with torch.device("meta"):
        model = build_bert(config_of(options))
    tokens = torch.zeros(options.batch, options.context, dtype=torch.int64)
    return Workload(
        model=model, example=tokens, loss=lambda logits: next_token_loss(logits, tokens), block_by_block=True
    )


def device_of(options: argparse.Namespace, runtime: farandole.Runtime) -> Machine:
    """Return a machine whose memory counts only tensors, as in `DeviceMemory`, and whose disk is arbitrary."""
    return Machine(
        memory=options.device_memory or sys.maxsize,
        disk=Bandwidth(1e9, 1e9, "any"),
        process=0,
        libraries=0,
        shared=runtime.comm.shares_memory(runtime.device),
        host=False,
    )


def predicted(options: argparse.Namespace, plan: Plan, runtime: farandole.Runtime) -> Estimate:
    """Return the estimated memory of a rank under `plan`."""
    return estimate_workload(workload_of(options), plan, runtime.size, device_of(options, runtime))


def masked_batches(options: argparse.Namespace) -> MaskedBatches:
    """Return masked windows of the text, which is tokenized once and cached."""
    text = prepare_text(
        options.text,
        vocabulary=options.vocabulary,
        context=options.context,
        special_tokens=(MASK,),
        cache=options.cache,
    )
    return MaskedBatches(text.train, masking_for(text.tokenizer, SEED), Sampler(text.train.samples, SEED))


class Log:
    """Prints lines on rank 0, and also writes them to a new file if `path` is given."""

    def __init__(self, path: Path | None, *, active: bool) -> None:
        self._path, self._active = path, active
        if path is not None and active:
            path.write_text("")

    def __call__(self, line: str) -> None:
        """Log a line on rank 0."""
        if not self._active:
            return
        print(line, flush=True)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(line + "\n")


def log_header(
    log: Log, options: argparse.Namespace, config: BERTConfig, plan: Plan, runtime: farandole.Runtime
) -> None:
    """Log the model, the plan and the predicted memory."""
    limit = "no limit" if options.device_memory is None else size(options.device_memory)
    log(
        f"BERT of {config.layers} layers, width {config.width}: {config.parameters:,} parameters; "
        f"{counted(runtime.size, 'rank')}, {limit} of device memory for each"
    )
    log(
        f"plan: zero={plan.zero} precision={plan.precision} recompute={plan.recompute} offload={plan.offload}"
    )
    need = predicted(
        options, plan, runtime
    )  # takes seconds, so all ranks compute the estimate and no rank waits
    parts = ", ".join(f"{name} {size(count)}" for name, count in need.parts.items() if count > 0)
    log(f"predicted memory per rank: {size(need.peak)}; during a step: {parts}")


def offload_line(mine: Budget, ranks: int) -> str:
    """Return a log line with the number of bytes that all ranks together offload per step."""
    return f"offloaded: {Budget(mine.read_bytes * ranks, mine.written_bytes * ranks, mine.bandwidth)}"


def memory_line(memory: DeviceMemory) -> str:
    """Return a log line with this rank's memory by kind, its peak, and the resident memory."""
    return f"in use: {size(memory.total)} ({by_kind(memory.in_use)}), at most {size(memory.peak)} so far{resident_note()}"


def iteration_line(
    number: int, options: argparse.Namespace, result: Iteration, runtime: farandole.Runtime
) -> str:
    """Return the log line of an iteration."""
    seconds = result.passes_s + result.update_s
    speed = options.batch * runtime.size / seconds
    return (
        f"iteration {number:>{len(str(options.iterations))}}/{options.iterations}  loss {result.loss:.4f}  "
        f"{speed:.3g} samples/s  {seconds:.2f} s (forward+backward {result.passes_s:.2f} s, "
        f"optimizer {result.update_s:.2f} s)  memory of a rank: {size(result.tracked)} tracked{result.resident}"
    )


def summary(
    results: list[Iteration], options: argparse.Namespace, memory: DeviceMemory, runtime: farandole.Runtime
) -> str:
    """Return the last log line.  This is a collective call."""
    peaks: list[int] = [0] * runtime.size
    dist.all_gather_object(peaks, memory.peak)
    seconds = sum(result.passes_s + result.update_s for result in results)
    samples = options.batch * runtime.size * len(results)
    limit = "" if memory.limit is None else f" of {size(memory.limit)}"
    return (
        f"{counted(len(results), 'iteration')} in {seconds:.1f} s: {samples / seconds:.3g} samples/s, "
        f"{samples * options.context / seconds:.3g} tokens/s; forward+backward "
        f"{sum(result.passes_s for result in results) / seconds:.0%}, optimizer "
        f"{sum(result.update_s for result in results) / seconds:.0%}; loss {results[0].loss:.4f} to "
        f"{results[-1].loss:.4f}; peak device memory of a rank {size(max(peaks))}{limit}"
    )


def resident_note() -> str:
    """Return text that states the proportional set size of this process (`Pss` in proc(5)); "" if not on Linux."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return ""
    used = next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return f", {size(used)} resident"


def bytes_of(text: str) -> int:
    """Parse an amount of memory such as `12GiB`, `512MiB` or `1000000`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])iB)?", text.strip())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"expected an amount of memory such as 12GiB or 512MiB, got {text!r}"
        )
    return max(1, int(float(match[1]) * 1024 ** " KMGT".index(match[2] or " ")))


def at_least_one(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Callable[..., Any] = parser.add_argument
    add(
        "--device-memory",
        type=bytes_of,
        metavar="SIZE",
        help="memory limit per rank, such as 12GiB (default: no limit)",
    )
    add("--zero", type=int, choices=(0, 1, 2, 3), default=0, help="ZeRO stage (default 0)")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="type of the weights (default fp32)")
    add(
        "--recompute",
        choices=("none", "block", "selective"),
        default="none",
        help="activations to recompute (default none)",
    )
    add(
        "--offload",
        default="none",
        metavar="WHERE",
        help="where to keep AdamW's states: none, host or disk:FOLDER (default none)",
    )
    add("--iterations", type=at_least_one, default=10, help="number of steps (default 10)")
    add("--batch", type=at_least_one, default=1, help="samples per rank and iteration (default 1)")
    add("--context", type=at_least_one, default=128, help="tokens per sample (default 128)")
    add("--rate", type=float, default=2e-5, help="learning rate (default 2e-5)")
    add("--layers", type=at_least_one, default=192, help="number of layers (default 192)")
    add("--width", type=at_least_one, default=1024, help="width of the hidden states (default 1024)")
    add("--heads", type=at_least_one, default=16, help="attention heads (default 16)")
    add(
        "--vocabulary",
        type=at_least_one,
        default=30522,
        help="vocabulary size of the tokenizer (default 30522)",
    )
    add(
        "--text",
        default="stdlib",
        metavar="PATH",
        help="a file or folder of text (default: Python's standard library)",
    )
    add(
        "--cache",
        type=Path,
        metavar="FOLDER",
        help="folder for tokenized text (default: the user's cache)",
    )
    add("--log", metavar="FILE", help="also write the output to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
