"""BERT with 2.5 billion parameters, trained where it does not fit: on a device of 12 GiB for each rank.

    farandole launch --ranks 2 labs/out_of_core_bert.py --device-memory 12GiB
    farandole launch --ranks 2 labs/out_of_core_bert.py --device-memory 12GiB --zero 3 --precision bf16 \\
        --recompute block --offload disk:/var/tmp

The first one stops, with the parameter for which there was no memory, and with plans that fit.  The second one trains:
ranks divide weights and gradients, activations are recomputed, and what AdamW keeps lies on the disk.

The model has 192 layers of width 1024 and restores masked tokens of real text, by default the sources of Python's
standard library.  No process holds the model as a whole: it is made block by block.  See docs/tutorials/out-of-core.md.
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
from farandole.models.bert import BERTConfig, bert_config, block_generator, build_bert, initialise
from farandole.models.loss import masked_token_loss, next_token_loss
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
    """What one iteration was: the mean loss in nats per masked token, and what it took of this rank.

    Seconds of the forward and backward passes and of the update, tracked bytes, and a note of the resident ones.
    """

    loss: float
    passes_s: float
    update_s: float
    tracked: int
    resident: str


def main() -> None:
    """Train, or say what would fit."""
    options = read_options()
    map_blocks_from(1 << 20)  # masters that have moved to the disk leave no gaps in the heap
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
    """All iterations as one rank; rank 0 prints them.  Raises `OutOfDeviceMemory`."""
    config = config_of(options)
    plan = Plan(
        zero=options.zero, precision=options.precision, recompute=options.recompute, offload=options.offload
    )
    log = Log(Path(options.log) if options.log else None, active=runtime.rank == 0)
    batches = masked_batches(options)
    introduce(log, options, config, plan, runtime)
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
            engine = farandole.parallelize(model, plan, initialise=fill_block)
        finally:
            torch.set_default_device(None)
        optimizer = engine.optimizer(torch.optim.AdamW(model.parameters(), lr=options.rate))
        log(f"made in {time.perf_counter() - started:.1f} s; {memory_line(memory)}")
        keep_freed_memory()  # from here on what is freed is wanted again in the next step
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
    """One step of all ranks, of `batch` samples each."""
    assert isinstance(model, nn.Sequential)
    started = time.perf_counter()
    inputs, targets = (
        torch.from_numpy(part).to(runtime.device)
        for part in batches.next(batch * runtime.size, runtime.rank, runtime.size)
    )
    loss, count = masked_token_loss(model[-1], model[:-1](inputs), targets)
    totals = torch.tensor([loss.item(), count], dtype=torch.float64, device=runtime.device)
    runtime.comm.all_reduce(totals)
    # the engine averages gradients over ranks: this makes them those of the mean over all ranks' masked tokens
    engine.backward(loss * (runtime.size / totals[1].item()))
    passed = time.perf_counter()
    engine.clip(1.0)
    optimizer.step()
    engine.zero_grad()
    ended = time.perf_counter()
    mean = (totals[0] / totals[1]).item()
    return Iteration(mean, passed - started, ended - passed, memory.total, resident_note())


def fill_block(name: str, block: nn.Module) -> None:
    """The weights of one block, as `build_bert(config, SEED)` draws them."""
    initialise(block, block_generator(SEED, int(name)))


def config_of(options: argparse.Namespace) -> BERTConfig:
    """The network: that of `bert-2.5b`, unless the options change it."""
    return bert_config(
        "bert-2.5b",
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        vocabulary=options.vocabulary,
        context=max(512, options.context),
    )


def workload_of(options: argparse.Namespace) -> Workload:
    """What the planner is asked about: logits at every token, where masked ones only need them, so a little too much."""
    with torch.device("meta"):
        model = build_bert(config_of(options))
    tokens = torch.zeros(options.batch, options.context, dtype=torch.int64)
    return Workload(
        model=model, example=tokens, loss=lambda logits: next_token_loss(logits, tokens), block_by_block=True
    )


def device_of(options: argparse.Namespace, runtime: farandole.Runtime) -> Machine:
    """A device on which tensors alone are counted, with a disk as large and fast as need be."""
    return Machine(
        memory=options.device_memory or sys.maxsize,
        disk=Bandwidth(1e9, 1e9, "any"),
        process=0,
        libraries=0,
        shared=runtime.comm.shares_memory(runtime.device),
        host=False,
    )


def predicted(options: argparse.Namespace, plan: Plan, runtime: farandole.Runtime) -> Estimate:
    """What the plan of the options needs of a rank."""
    return estimate_workload(workload_of(options), plan, runtime.size, device_of(options, runtime))


def masked_batches(options: argparse.Namespace) -> MaskedBatches:
    """Windows of the text with masked tokens; the text is tokenized once and kept in the cache."""
    text = prepare_text(
        options.text,
        vocabulary=options.vocabulary,
        context=options.context,
        special_tokens=(MASK,),
        cache=options.cache,
    )
    return MaskedBatches(text.train, masking_for(text.tokenizer, SEED), Sampler(text.train.samples, SEED))


class Log:
    """Lines for the screen and, if it is given, a file, which is made anew."""

    def __init__(self, path: Path | None, *, active: bool) -> None:
        self._path, self._active = path, active
        if path is not None and active:
            path.write_text("")

    def __call__(self, line: str) -> None:
        """Write a line, on rank 0."""
        if not self._active:
            return
        print(line, flush=True)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(line + "\n")


def introduce(
    log: Log, options: argparse.Namespace, config: BERTConfig, plan: Plan, runtime: farandole.Runtime
) -> None:
    """What is going to be trained, how, and what it is predicted to keep."""
    limit = "no limit" if options.device_memory is None else size(options.device_memory)
    log(
        f"BERT of {config.layers} layers, width {config.width}: {config.parameters:,} parameters; "
        f"{counted(runtime.size, 'rank')}, {limit} of device memory for each"
    )
    log(
        f"plan: zero={plan.zero} precision={plan.precision} recompute={plan.recompute} offload={plan.offload}"
    )
    need = predicted(options, plan, runtime)  # takes seconds: on all ranks, so that none waits
    parts = ", ".join(f"{name} {size(count)}" for name, count in need.parts.items() if count > 0)
    log(f"predicted for each rank: {size(need.peak)}; in a step {parts}")


def offload_line(mine: Budget, ranks: int) -> str:
    """What each step reads and writes where masters and states are offloaded to, all ranks together."""
    return f"offloaded: {Budget(mine.read_bytes * ranks, mine.written_bytes * ranks, mine.bandwidth)}"


def memory_line(memory: DeviceMemory) -> str:
    """What this rank has in use, by kind, the most it had, and what the system counts."""
    return f"in use: {size(memory.total)} ({by_kind(memory.in_use)}), at most {size(memory.peak)} so far{resident_note()}"


def iteration_line(
    number: int, options: argparse.Namespace, result: Iteration, runtime: farandole.Runtime
) -> str:
    """One line of the log."""
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
    """The last line.  All ranks call it together."""
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
        f"{results[-1].loss:.4f}; most device memory of a rank {size(max(peaks))}{limit}"
    )


def resident_note() -> str:
    """Memory of this process as Linux counts it: private pages, and its share of those that processes have in common.

    It is `Pss` of proc(5); nothing is said elsewhere.
    """
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return ""
    used = next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return f", {size(used)} resident"


def bytes_of(text: str) -> int:
    """`12GiB`, `512MiB`, `1000000`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])iB)?", text.strip())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of memory, as in 12GiB or 512MiB")
    return max(1, int(float(match[1]) * 1024 ** " KMGT".index(match[2] or " ")))


def at_least_one(text: str) -> int:
    """A whole number of something that there must be."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Callable[..., Any] = parser.add_argument
    add(
        "--device-memory",
        type=bytes_of,
        metavar="SIZE",
        help="of each rank, enforced: 12GiB (default: no limit)",
    )
    add("--zero", type=int, choices=(0, 1, 2, 3), default=0, help="what ranks divide (default 0: nothing)")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="of the weights (default fp32)")
    add(
        "--recompute",
        choices=("none", "block", "selective"),
        default="none",
        help="activations (default none)",
    )
    add(
        "--offload",
        default="none",
        metavar="WHERE",
        help="of AdamW: none, host or disk:FOLDER (default none)",
    )
    add("--iterations", type=at_least_one, default=10, help="(default 10)")
    add("--batch", type=at_least_one, default=1, help="samples of each rank in an iteration (default 1)")
    add("--context", type=at_least_one, default=128, help="tokens of a sample (default 128)")
    add("--rate", type=float, default=2e-5, help="learning rate (default 2e-5)")
    add("--layers", type=at_least_one, default=192, help="(default 192)")
    add("--width", type=at_least_one, default=1024, help="(default 1024)")
    add("--heads", type=at_least_one, default=16, help="(default 16)")
    add("--vocabulary", type=at_least_one, default=30522, help="(default 30522)")
    add(
        "--text",
        default="stdlib",
        metavar="PATH",
        help="a file or folder of text (default: Python's sources)",
    )
    add(
        "--cache",
        type=Path,
        metavar="FOLDER",
        help="where the tokenized text is kept (default: the user's cache)",
    )
    add("--log", metavar="FILE", help="also write the lines there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
