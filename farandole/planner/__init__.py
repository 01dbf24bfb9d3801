"""Predict the memory per rank and the step time of a plan before training starts.

    machine = Machine(memory=16 << 30)
    estimate(model, Plan(zero=2), 8, example=tokens, loss=loss_of, machine=machine).outcome(machine.memory)

The planner divides the parameters into the same buckets as the engine (`parallel.zero.sharding`), and runs a forward
and a backward pass on fake tensors.
"""

from farandole.planner.estimate import (
    Estimate,
    PipelineSummary,
    estimate,
    estimate_ranks,
    estimate_workload,
)
from farandole.planner.memory import StateBytes, bytes_per_parameter, state_bytes
from farandole.planner.search import estimated_plans, plan_candidates, what_fits
from farandole.planner.trace import Trace, trace
from farandole.planner.workload import Machine, Workload

__all__ = [
    "Estimate",
    "Machine",
    "PipelineSummary",
    "StateBytes",
    "Trace",
    "Workload",
    "bytes_per_parameter",
    "estimate",
    "estimate_ranks",
    "estimate_workload",
    "estimated_plans",
    "plan_candidates",
    "state_bytes",
    "trace",
    "what_fits",
]
