"""Measure pipelines: idle time against the simulator, memory, and speed against `torch.distributed.pipelining`.

    python -m benchmarks.pipeline [--ranks 2 | --ranks 4]

Each rank has one thread.

With four ranks, stages sleep, so that the number of cores does not matter:

- `idle`: the idle fraction of a step with 8 micro-batches, measured and simulated, for every schedule.
- `memory`: the peak memory of all tensors except weights in a step, measured and simulated; here, stages compute.

With two ranks on two cores, stages compute:

- `idle`: as above; the simulator uses the median time of each kind of action in each stage.
- `speed`: a forward and a backward pass of 8 transformer layers for 8 micro-batches; the implementations alternate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.distributed import pipelining

import farandole
from benchmarks.measure import records_table, save, seconds_per_round, start
from farandole._startup import keep_freed_memory
from farandole.launch.runtime import Runtime
from farandole.memory.tracker import MemoryTracker
from farandole.parallel.engine import Engine
from farandole.parallel.pipeline.balance import balance, measure_blocks, parameter_costs
from farandole.parallel.pipeline.measured import measured_timeline
from farandole.parallel.pipeline.schedule import Schedule, ScheduleError, build, registered
from farandole.parallel.pipeline.simulate import Costs, simulate
from farandole.plan import Plan

MICRO_BATCHES, ROUNDS = 8, 9
MEASURED = ("layer", "gpipe", "1f1b", "v-half", "v-min", "zb-v", "gems", "gems-w")
"""The schedules whose memory is measured."""
DEPTH = 48
"""The number of layers in a rank's part of the model when memory is measured."""
UNIT_S = 0.01
"""The time in seconds that a rank sleeps in each forward, input-gradient and weight-gradient pass of its stages."""
LAYERS, WIDTH, HEADS, WORDS = 8, 256, 4, 1024
SAMPLES, LENGTH = 2, 128
"""The number of samples in a micro-batch and their length, for transformer layers."""
OURS, GLOO, BACKEND = "farandole", "torch over Gloo", "torch over farandole"

TORCH = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zb-v": pipelining.ScheduleZBVZeroBubble,
    "dualpipe-v": pipelining.ScheduleDualPipeV,
}
"""Torch's schedules that place the stages as farandole's schedules do."""


def schedules(ranks: int) -> list[Schedule]:
    """Return all schedules that support this number of ranks and `MICRO_BATCHES` micro-batches."""
    found = []
    for each in registered():
        try:
            found.append(build(each.name, ranks, MICRO_BATCHES))
        except ScheduleError:
            continue
    return found


# ---- stages that sleep ----


class _Slept(Function):
    """Sleeps in the forward pass and while the gradient of the input is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_s = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class _SleptWeight(Function):
    """Sleeps while the gradient of the weight is computed."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Sleeping(nn.Module):
    """A block that sleeps for `seconds` in each forward, input-gradient and weight-gradient pass."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, 8) to the same shape."""
        slept: Tensor = _Slept.apply(x, self.seconds, self.seconds)
        weight: Tensor = _SleptWeight.apply(self.weight, self.seconds)
        return slept + weight


def step_of(engine: Engine, batches: list[Any], loss: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    """Return a function that runs a forward and a backward pass of the engine, and clears the gradients."""
    optimizer = engine.optimizer(torch.optim.SGD(engine.model.parameters(), 0.0))

    def step() -> None:
        engine.forward_backward(batches, loss)
        optimizer.zero_grad()

    return step


def measured_idle(engine: Engine, step: Callable[[], Any], runtime: Runtime, rounds: int) -> list[Any]:
    """Return the timelines of `rounds` steps after a warm-up step."""
    assert engine.pipeline is not None
    timelines = []
    for number in range(rounds + 1):
        runtime.comm.barrier()
        step()
        if number:
            timelines.append(measured_timeline(engine.pipeline, runtime.comm))
    return timelines


def idle_row(name: str, timelines: list[Any], expected: list[float]) -> dict[str, Any]:
    """Return one row of the idle table: fractions in percent, and differences in percentage points."""
    found = [timeline.idle for timeline in timelines]
    differences = sorted(100 * (m - e) for m, e in zip(found, expected, strict=True))
    return {
        "schedule": name,
        "idle, simulated": f"{100 * statistics.median(expected):.1f} %",
        "idle, measured": f"{100 * statistics.median(found):.1f} %",
        "difference, points": f"{statistics.median(differences):+.1f}",
        "lowest": f"{differences[0]:+.1f}",
        "highest": f"{differences[-1]:+.1f}",
        "step, ms": f"{1e3 * statistics.median(t.makespan for t in timelines):.0f}",
    }


def sleeping(runtime: Runtime) -> list[dict[str, Any]]:
    """Measure the idle fraction of sleeping stages; the input of the first stage needs no gradient."""
    rows = []
    for schedule in schedules(runtime.size):
        seconds = UNIT_S / schedule.chunks
        model = nn.Sequential(*(Sleeping(seconds) for _ in range(schedule.stages)))
        engine = farandole.parallelize(model, Plan(pipeline=runtime.size, schedule=schedule.name))
        step = step_of(engine, [torch.zeros(1, 8)] * MICRO_BATCHES, lambda y, _: (y.sum(), 1))
        timelines = measured_idle(engine, step, runtime, 3)
        each = (seconds,) * schedule.stages
        costs = Costs(each, (0.0, *each[1:]), each)
        rows.append(idle_row(schedule.name, timelines, [simulate(schedule, costs).idle] * len(timelines)))
    return rows


# ---- stages that compute ----


class Perceptron(nn.Module):
    """A block with `depth` layers, which keeps the input of each layer."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, 64) to the same shape."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def memory(runtime: Runtime) -> list[dict[str, Any]]:
    """Measure the peak memory of a step.

    Between an input gradient and its weight gradient, every layer keeps its input and the gradient of its output.
    """
    rows = []
    for schedule in (build(name, runtime.size, MICRO_BATCHES) for name in MEASURED):
        torch.manual_seed(0)
        depth = DEPTH // schedule.chunks
        model = nn.Sequential(*(Perceptron(depth) for _ in range(schedule.stages)))
        example = torch.randn(4096, 64)
        cost = measure_blocks(model, example, 1)[0].activation_bytes
        engine = farandole.parallelize(model, Plan(pipeline=runtime.size, schedule=schedule.name))
        batches = [example.clone() for _ in range(MICRO_BATCHES)]
        step = step_of(engine, batches, lambda y, _: (y.square().sum(), len(y)))
        step()
        with MemoryTracker((*model.parameters(), *batches)) as tracker:
            step()
        peaks = runtime.comm.all_gather_object(tracker.peak)
        expected = simulate(
            schedule,
            Costs(activation=(cost,) * schedule.stages, waiting=(2 * cost,) * schedule.stages),
        )
        unit = cost * schedule.chunks
        rows.append(
            {
                "schedule": schedule.name,
                "peak, simulated": f"{expected.peak / unit:.2f}",
                "peak, measured": f"{max(peaks) / unit:.2f}",
                "measured / simulated": f"{max(peaks) / expected.peak:.2f}",
            }
        )
    return rows


class Ends(nn.Module):
    """The first or the last block of a transformer: an embedding, or the logits."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.body = nn.Embedding(WORDS, WIDTH) if first else nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens to hidden states, or hidden states to logits."""
        result: Tensor = self.body(x)
        return result


def transformer() -> nn.Sequential:
    """Return a transformer, with the same weights in every call."""
    torch.manual_seed(0)
    layers = (
        nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True, dtype=torch.float32
        )
        for _ in range(LAYERS)
    )
    return nn.Sequential(Ends(first=True), *layers, Ends(first=False))


def our_step(name: str, ranks: int, tokens: Tensor) -> tuple[Engine, Callable[[], Any]]:
    """Return farandole's engine and a step on tokens of shape (micro-batches, samples, length)."""
    engine = farandole.parallelize(transformer(), Plan(pipeline=ranks, schedule=name))

    def loss(logits: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        total = F.cross_entropy(logits.flatten(0, 1), batch.flatten(), reduction="sum")
        return total, batch.numel()

    return engine, step_of(engine, list(tokens), loss)


def torch_step(name: str, tokens: Tensor, group: dist.ProcessGroup) -> Callable[[], Any]:
    """Return a step with `torch.distributed.pipelining` and the same blocks in each stage."""
    schedule, model = build(name, group.size(), MICRO_BATCHES), transformer()
    ranges = balance(parameter_costs(model), schedule.stages).ranges
    stages = []
    for number in schedule.stages_of(group.rank()):
        blocks = nn.Sequential(*(model[place] for place in ranges[number]))
        stages.append(
            pipelining.PipelineStage(blocks, number, schedule.stages, torch.device("cpu"), group=group)
        )

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    several = name not in ("gpipe", "1f1b")
    runs: Any = TORCH[name](stages if several else stages[0], MICRO_BATCHES, loss_fn=loss)
    inputs = (tokens.flatten(0, 1),) if any(stage.is_first for stage in stages) else ()
    target = tokens.flatten(0, 1) if any(stage.is_last for stage in stages) else None

    def step() -> None:
        runs.step(*inputs, target=target, losses=[] if target is not None else None)
        for stage in stages:
            stage.submod.zero_grad()

    return step


def computing(runtime: Runtime) -> dict[str, list[dict[str, Any]]]:
    """Measure the idle fraction of stages that compute, and the speed."""
    tokens = torch.randint(0, WORDS, (MICRO_BATCHES, SAMPLES, LENGTH))
    idle, speed = [], []
    for schedule in schedules(runtime.size):
        engine, step = our_step(schedule.name, runtime.size, tokens)
        timelines = measured_idle(engine, step, runtime, ROUNDS)
        expected = [simulate(schedule, timeline.costs).idle for timeline in timelines]
        idle.append(idle_row(schedule.name, timelines, expected))
    for name in TORCH:
        ranks = list(range(runtime.size))
        steps = {
            OURS: our_step(name, runtime.size, tokens)[1],
            GLOO: torch_step(name, tokens, dist.new_group(ranks, backend="gloo")),
            BACKEND: torch_step(name, tokens, dist.new_group(ranks, backend="farandole")),
        }
        speed.append(speed_row(name, seconds_per_round(steps, runtime.comm.barrier, ROUNDS, warm_ups=2)))
    return {"idle": idle, "speed": speed}


def speed_row(name: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return one row of the table: median times, and the median, lowest and highest ratios within a round."""
    row: dict[str, Any] = {"schedule": name}
    row |= {f"{each}, ms": f"{1e3 * statistics.median(found):.1f}" for each, found in seconds.items()}
    for other in (GLOO, BACKEND):
        ratios = sorted(theirs / ours for ours, theirs in zip(seconds[OURS], seconds[other], strict=True))
        row[f"x {other}"] = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return row


def run_rank() -> None:
    """Measure as one rank; rank 0 prints the report."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as `farandole train` does, for all implementations
    with farandole.init() as runtime:
        if runtime.size == 2:
            result = computing(runtime)
        else:
            result = {"idle": sleeping(runtime), "memory": memory(runtime)}
        if runtime.rank == 0:
            for rows in result.values():
                print(records_table(rows), end="\n\n")
            path = save(f"pipeline-{runtime.size}", {"ranks": runtime.size, **result})
            print(f"results written to {path}")


if __name__ == "__main__":
    start(__doc__ or "", "benchmarks.pipeline", run_rank, pin=True)
