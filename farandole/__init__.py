"""Farandole: parallel computing on PyTorch.

    import farandole

    with farandole.init() as runtime:       # alone, or under farandole launch, torchrun, mpirun, srun
        gradients = runtime.comm.empty(1_000_000)
        runtime.comm.all_reduce(gradients, "avg")

Importing the package is fast: torch and the public names below are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from farandole._startup import uncollected

if TYPE_CHECKING:
    from farandole.comm.communicator import Communicator
    from farandole.launch.runtime import Runtime, init
    from farandole.parallel.parallelize import parallelize
    from farandole.parallel.pipeline.stage_error import StageError
    from farandole.plan import LoRA, Plan, PlanError
    from farandole.serve.llm import LLM

__all__ = [
    "LLM",
    "Communicator",
    "LoRA",
    "Plan",
    "PlanError",
    "Runtime",
    "StageError",
    "__version__",
    "init",
    "parallelize",
]

__version__ = "0.1.0"

_HOMES = {
    "Communicator": "farandole.comm.communicator",
    "LLM": "farandole.serve.llm",
    "LoRA": "farandole.plan",
    "Plan": "farandole.plan",
    "PlanError": "farandole.plan",
    "Runtime": "farandole.launch.runtime",
    "StageError": "farandole.parallel.pipeline.stage_error",
    "init": "farandole.launch.runtime",
    "parallelize": "farandole.parallel.parallelize",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'farandole' has no attribute {name!r}; it has {', '.join(__all__)}")
    with uncollected():
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
