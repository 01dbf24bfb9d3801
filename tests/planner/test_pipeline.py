"""Predicted memory of pipeline ranks, compared with the tensors of real ranks in a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import farandole
from farandole.memory.disk import Bandwidth
from farandole.memory.tracker import MemoryTracker
from farandole.models.deepseek import build_deepseek
from farandole.models.gpt import GPTConfig, build_gpt
from farandole.models.llama import LlamaConfig, build_llama
from farandole.models.mixtral import MixtralConfig, build_mixtral
from farandole.models.moe import Balance
from farandole.parallel.pipeline import balance
from farandole.plan import Plan
from farandole.planner import Machine, Workload, estimate_workload
from farandole.planner.pipeline import PipelineStep, StagedModel, simulate_step
from farandole.planner.search import estimates_of
from farandole.planner.stage_trace import StageTracer
from tests.parallel.plans import DEEPSEEK

WORDS, LENGTH, SAMPLES = 512, 64, 4
MODELS: dict[str, Any] = {
    "gpt": lambda: build_gpt(GPTConfig(WORDS, LENGTH, 8, 4, 64)),
    "shallow gpt": lambda: build_gpt(GPTConfig(WORDS, LENGTH, 4, 4, 64)),
    "llama": lambda: build_llama(LlamaConfig(WORDS, 8, 4, 64, 160, kv_heads=2)),
}
EXPERTS: dict[str, Any] = {
    "mixtral": lambda: build_mixtral(
        MixtralConfig(WORDS, 8, 4, 64, 96, kv_heads=2, experts=4, top=2, balance=Balance(0.5, 0.1))
    ),
    "deepseek": lambda: build_deepseek(
        replace(DEEPSEEK, vocabulary=WORDS, width=64, layers=6, expert_inner=64, predicted=1)
    ),
}
TOLERANCE = 0.05
"""The largest relative error: messages arrive at different times in a real step and in the simulated step."""
MACHINE = Machine(memory=1 << 34)


def _workload(name: str, micro_batches: int = 8) -> Workload:
    with torch.device("meta"):
        model = (MODELS | EXPERTS)[name]()
        tokens = torch.empty(SAMPLES, LENGTH, dtype=torch.int64)
    return Workload(
        model=model,
        example=(tokens, None, tokens),
        loss=lambda output: output[0],
        micro_batches=micro_batches,
    )


def _fill(name: str, block: nn.Module) -> None:
    for tensor in (*block.parameters(), *block.buffers()):
        tensor.zero_()


def _peak(rank: int, size: int, name: str, plan: Plan) -> tuple[int, int]:
    """Return the bytes of this rank's parameters, and the peak of all other tensors in a step after the first one.

    The number of micro-batches is `_in_flight(plan)`.
    """
    chosen = plan.recompute in ("attention", "auto")
    torch.manual_seed(0)
    with torch.device("meta" if chosen else "cpu"):  # a model on the meta device is divided by parameters
        model: nn.Module = (MODELS | EXPERTS)[name]()
    tokens = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64)
    options = {"example": (tokens, None, tokens), "loss": lambda output: output[0], "initialize": _fill}
    engine = farandole.parallelize(model, plan, **(options if chosen else {}))
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    batches = [torch.randint(0, WORDS, (SAMPLES, LENGTH)) for _ in range(_in_flight(plan))]

    def step() -> None:
        engine.forward_backward(batches, lambda output, _: output, lambda batch: (batch, None, batch))

    step()
    optimizer.step()
    optimizer.zero_grad()
    kept = [each.bucket.reduced for each in engine.shards_of_buckets]
    with MemoryTracker((*model.parameters(), *model.buffers(), *batches, *kept)) as tracker:
        step()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    engine.close()
    return weights, tracker.peak


def _in_flight(plan: Plan) -> int:
    """Return a number of micro-batches above the number that 1F1B keeps in memory."""
    return 2 * plan.pipeline


def _errors(ranks: Any, name: str, plans: list[Plan]) -> list[str]:
    """Return a line for each rank whose predicted activations are wrong; all plans have the same number of stages."""
    size = plans[0].pipeline
    wrong = []
    for found in estimates_of(_workload(name, _in_flight(plans[0])), size, MACHINE, plans):
        assert found.pipeline is not None
        seen = ranks(size).run(_peak, name, found.plan)
        assert max(weights for weights, _ in seen) >= found.parts["weights"]
        for rank, (predicted, (_, peak)) in enumerate(zip(found.pipeline.activations, seen, strict=True)):
            error = predicted / peak - 1
            if abs(error) > TOLERANCE:
                wrong.append(f"{found.plan.schedule}, {found.plan.recompute}, rank {rank}: {error:+.3f}")
    return wrong


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("gpt", 2),
        ("llama", 4),
        pytest.param("gpt", 4, marks=pytest.mark.slow),
        pytest.param("llama", 2, marks=pytest.mark.slow),
    ],
)
def test_predicted_activations_match_real_ranks(ranks: Any, name: str, size: int) -> None:
    """Compare every rank, for schedules with and without separate weight gradients, and for recomputed blocks."""
    plans = [
        Plan(pipeline=size, schedule="gpipe"),
        Plan(pipeline=size, schedule="1f1b"),
        Plan(pipeline=size, schedule="1f1b", recompute="block"),
        Plan(pipeline=size, schedule="zb-v"),
        Plan(pipeline=size, schedule="gems"),
    ]
    wrong = _errors(ranks, name, plans)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(pipeline=2, recompute="attention"),
        Plan(pipeline=2, recompute="auto", activation_bytes=6 << 20),
    ],
    ids=lambda plan: plan.recompute,
)
def test_predicted_activations_match_ranks_that_choose_modules_to_recompute(ranks: Any, plan: Plan) -> None:
    """A dry run determines the modules."""
    assert not _errors(ranks, "shallow gpt", [plan])


@pytest.mark.parametrize(
    ("name", "plan", "size"),
    [
        ("mixtral", Plan(pipeline=2), 2),
        ("mixtral", Plan(pipeline=2, expert=2, schedule="zb-h1"), 4),
        ("deepseek", Plan(pipeline=2, expert=2), 4),
        ("llama", Plan(pipeline=2, tensor=2, sequence=True), 4),
    ],
)
def test_predicted_activations_match_ranks_that_share_stages(
    ranks: Any, name: str, plan: Plan, size: int
) -> None:
    found = estimate_workload(_workload(name, _in_flight(plan)), plan, size, MACHINE)
    assert found.pipeline is not None
    seen = ranks(size).run(_peak, name, plan)
    peaks = [peak for _, peak in seen]
    for stage, predicted in enumerate(found.pipeline.activations):
        own = peaks[stage * size // 2 : (stage + 1) * size // 2]
        # experts have different loads, and the planner assumes equal ones
        tolerance = TOLERANCE + 0.05 * (plan.expert > 1)
        assert sum(own) / len(own) == pytest.approx(predicted, rel=tolerance)


def test_the_memory_of_1f1b_does_not_grow_with_the_micro_batches() -> None:
    plan = Plan(pipeline=2, recompute="block")
    few, many = (
        estimate_workload(replace(_workload("gpt"), micro_batches=number), plan, 2, MACHINE)
        for number in (8, 64)
    )
    assert few.pipeline is not None and many.pipeline is not None
    assert many.pipeline.activations == few.pipeline.activations
    assert many.pipeline.idle < few.pipeline.idle
    assert few.mean_peak == sum(few.pipeline.peaks) / 2 <= few.peak


def test_schedules_that_place_stages_differently_keep_their_states() -> None:
    plans = [
        Plan(pipeline=2, schedule=schedule, recompute=recompute)
        for recompute in ("none", "selective")
        for schedule in ("1f1b", "interleaved")
    ]
    for one in estimates_of(_workload("gpt"), 2, MACHINE, plans):
        alone = estimate_workload(_workload("gpt"), one.plan, 2, MACHINE)
        assert one.parts == alone.parts and one.pipeline == alone.pipeline


def _wide() -> nn.Sequential:
    blocks = (nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(6))
    return nn.Sequential(*blocks)


def _swapped(rank: int, size: int, plan: Plan) -> int:
    """Return the bytes that a rank swaps out in a step."""
    engine = farandole.parallelize(_wide(), plan)
    samples = [torch.randn(1024, 128) for _ in range(4)]
    engine.forward_backward(samples, lambda output, _: (output.square().sum(), output.numel()))
    assert engine.swapped is not None
    written = engine.swapped.written_bytes
    engine.close()
    return written


@pytest.mark.parametrize("schedule", ["1f1b", "gems"])
def test_swapped_bytes_of_stages_match_real_ranks(ranks: Any, tmp_path: Path, schedule: str) -> None:
    plan = Plan(pipeline=2, schedule=schedule, swap=f"disk:{tmp_path}")
    with torch.device("meta"):
        workload = Workload(model=_wide(), example=torch.empty(1024, 128), micro_batches=4)
    step = _simulated(workload, plan)
    for trace, written in zip(step.traces, ranks(2).run(_swapped, plan), strict=True):
        assert 4 * trace.swapped == pytest.approx(written, rel=0.01)
    in_flight = {"1f1b": [2, 1], "gems": [1, 1]}[schedule]
    assert [trace.swappable / trace.swapped for trace in step.traces] == pytest.approx(in_flight, rel=0.1)
    machine = replace(MACHINE, disk=Bandwidth(1e9, 1e9, "buffered"))
    assert estimate_workload(workload, plan, 2, machine).times["swap"] > 0


def _simulated(workload: Workload, plan: Plan) -> PipelineStep:
    staged = StagedModel(workload.split(plan, 2), plan)
    return simulate_step(staged, plan, 2, MACHINE, StageTracer())


def test_stages_are_divided_within_the_memory_of_a_rank() -> None:
    """Rank 0 has activations of two micro-batches, and therefore gets fewer blocks than in a division by parameters."""
    workload = _workload("gpt")

    def divided(stage_bytes: int) -> balance.Balance:
        plan = Plan(pipeline=2, stage_bytes=stage_bytes)
        return StagedModel(workload.split(plan, 2), plan).balance

    free = divided(1 << 40)
    size = int(0.9 * max(free.sizes))
    limited = divided(size)
    assert limited.ranges[0].stop < free.ranges[0].stop
    assert max(limited.sizes) <= size
    plans = [Plan(pipeline=2), Plan(pipeline=2, stage_bytes=size)]
    found = [one.parts["activations"] for one in estimates_of(workload, 2, MACHINE, plans)]
    assert found == [estimate_workload(workload, plan, 2, MACHINE).parts["activations"] for plan in plans]
