"""How much memory each rank of a plan needs, and how long its steps take, predicted before anything runs."""

from farandole.memory.estimate.fitting import estimated_plans, what_fits
from farandole.memory.estimate.machine import Machine
from farandole.memory.estimate.plans import Estimate, estimate, estimate_workload, plan_candidates
from farandole.memory.estimate.trace import Trace, trace
from farandole.memory.estimate.workload import Workload

__all__ = [
    "Estimate",
    "Machine",
    "Trace",
    "Workload",
    "estimate",
    "estimate_workload",
    "estimated_plans",
    "plan_candidates",
    "trace",
    "what_fits",
]
