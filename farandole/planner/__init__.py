"""Predict what a plan costs before anything runs: the memory of each rank, and the time of a step.

    machine = Machine(memory=16 << 30)
    estimate(model, Plan(zero=2), 8, example=tokens, loss=loss_of, machine=machine).outcome(machine.memory)

The bytes are those of the layouts with which the engine would divide the model (`parallel.sharding`), computed for a model on the meta
device, and of a forward and backward pass on fake tensors.
"""

from farandole.planner.estimate import Estimate, estimate, estimate_workload
from farandole.planner.memory import StateBytes, bytes_per_parameter, state_bytes
from farandole.planner.search import estimated_plans, plan_candidates, what_fits
from farandole.planner.trace import Trace, trace
from farandole.planner.workload import Machine, Workload

__all__ = [
    "Estimate",
    "Machine",
    "StateBytes",
    "Trace",
    "Workload",
    "bytes_per_parameter",
    "estimate",
    "estimate_workload",
    "estimated_plans",
    "plan_candidates",
    "state_bytes",
    "trace",
    "what_fits",
]
