"""Run one rank of a training job.

Under farandole's launcher, each rank runs `python -m farandole.train.worker ORDER` after the launching process has
checked ORDER.  Under another launcher, each rank parses the command itself and calls `join`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import farandole
from farandole._startup import pause_collection, resume_collection
from farandole.launch.runtime import Runtime
from farandole.train.config import ConfigError
from farandole.train.memory import check_memory
from farandole.train.run import train
from farandole.train.start import REFUSALS, Order, Request, check, order, task_config
from farandole.train.tasks import make_task


def main(text: str) -> None:
    """Run a JSON order on this rank."""
    given = Order.load(text)
    with farandole.init() as runtime:
        _run(given, runtime)


def join(request: Request) -> Path:
    """Train as one rank in a job started by another launcher, and return the run's folder.

    All ranks must have the same command.
    """
    with farandole.init() as runtime:
        given = _agree(request, runtime)
        _run(given, runtime)
    return given.run


def _agree(request: Request, runtime: Runtime) -> Order:
    """Return rank 0's order for the request.  If rank 0 rejects the request, end all ranks."""
    text, refused = "", ""
    if runtime.rank == 0:
        try:
            start = check(request, runtime.size)
            prepared = task_config(start.config, start.checkpoint)
            check_memory(prepared, runtime.local_size)
            make_task(prepared)
            text = order(start).dump()
        except REFUSALS as refusal:
            refused = str(refusal)
    text = runtime.comm.broadcast_object(text)
    if text:
        return Order.load(text)
    if runtime.rank == 0:
        raise ConfigError(refused)
    sys.exit(2)  # rank 0 prints the reason


def _run(given: Order, runtime: Runtime) -> None:
    """Train.  Exit with a message for user errors, or with the signal's status after a signal."""
    pause_collection()  # resumed at the first step
    try:
        ended_by = train(given.config, given.run, given.checkpoint, runtime)
    except REFUSALS as refusal:
        raise SystemExit(str(refusal)) from refusal
    finally:
        resume_collection()
    if ended_by is not None:
        sys.exit(128 + ended_by)


if __name__ == "__main__":
    main(sys.argv[1])
