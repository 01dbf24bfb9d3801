"""Propagate an exception from one stage to all ranks, without disrupting the order of messages.

After an exception, a rank computes nothing more in this step, but still exchanges every message of its schedule.
Instead of hidden states, the rank sends an empty tuple; instead of gradients, it sends zeros that are marked as
invalid.  Ranks that receive these messages also stop computing.  Ranks that wait for a failed rank of the same stage
also fail (`stage_peers`).  Therefore all ranks reach the end of the step, where all of them raise the same error, and
no message is left over for the next step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from farandole._troubleshooting import Documented
from farandole.comm.communicator import ReduceName
from farandole.comm.errors import RankLeft
from farandole.parallel.pipeline.schedule import Action

_PASSES = {
    "F": "the forward pass",
    "B": "the backward pass",
    "I": "the input gradient",
    "W": "the weight gradient",
}


class StageError(Documented, RuntimeError):
    """Raised on all ranks after an exception in a pipeline stage; on the failed rank, `__cause__` is the exception.

    The message names the rank, the stage, the pass, the micro-batch and the exception.
    """

    _section = "stageerror"


@dataclass(frozen=True)
class StageFailure:
    """An exception that ended an action on this rank; `at` is the time of the failure, as returned by `time.time`."""

    action: Action
    error: Exception
    at: float = field(default_factory=time.time)

    @property
    def order(self) -> tuple[bool, float]:
        """The key that sorts failures by time, with `RankLeft` last, because another failure causes it."""
        return isinstance(self.error, RankLeft), self.at

    def __str__(self) -> str:
        kind, action = type(self.error), self.action
        error = (
            kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        )
        return (
            f"{_PASSES[action.code]} of micro-batch {action.micro_batch} failed in stage {action.stage}: "
            f"{error}: {self.error}"
        )


class _Ranks(Protocol):
    """A communicator with the collectives that `raise_on_all` needs."""

    def all_reduce(self, tensor: Tensor, op: ReduceName) -> Any: ...

    def all_gather_object(self, value: Any) -> list[Any]: ...


def raise_on_all(comm: _Ranks, rank: int, failure: StageFailure | None) -> None:
    """Raise `StageError` on all ranks if an action failed on any of them.

    This is a collective call.  If actions failed on several ranks, the message describes the first failure.

    Args:
        rank: the rank number that identifies this rank in error messages.
        failure: the failure of this rank, if an action failed.
    """
    failed = torch.tensor([failure is not None], dtype=torch.int32)
    comm.all_reduce(failed, "max")
    if not failed:
        return
    found = comm.all_gather_object(None if failure is None else (failure.order, f"rank {rank}: {failure}"))
    _, text = min(each for each in found if each is not None)
    raise StageError(text) from getattr(failure, "error", None)
