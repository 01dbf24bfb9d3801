"""One rank of a training job.

Under our own launcher it is a module to run, `python -m farandole.train.worker ORDER`, where ORDER is what
the launching process has checked.  Under another launcher every rank reads the command itself: `join`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

import farandole
from farandole._startup import pause_collection, resume_collection
from farandole.launch.runtime import Runtime
from farandole.train.config import ConfigError
from farandole.train.memory import check_memory
from farandole.train.run import train
from farandole.train.start import REFUSALS, Order, Request, check, order
from farandole.train.tasks import make_task


def main(text: str) -> None:
    """Run an order as one of the ranks that were launched for it."""
    given = Order.load(text)
    with farandole.init() as runtime:
        _run(given, runtime)


def join(request: Request) -> Path:
    """Train as one rank of a job that another launcher started, with the same command on every rank.

    Returns the folder of the run.
    """
    with farandole.init() as runtime:
        given = _agree(request, runtime)
        _run(given, runtime)
    return given.run


def _agree(request: Request, runtime: Runtime) -> Order:
    """Rank 0 checks the request and makes the folder; all ranks get its order, or end."""
    answer: list[str | None] = [None, None]
    if runtime.rank == 0:
        try:
            start = check(request, runtime.size)
            check_memory(start.config, runtime.local_size)
            make_task(start.config)
            answer[0] = order(start).dump()
        except REFUSALS as refusal:
            answer[1] = str(refusal)
    dist.broadcast_object_list(answer, src=0, group=runtime.comm.group)
    text, refused = answer
    if text is None and runtime.rank == 0:
        raise ConfigError(refused)
    if text is None:  # rank 0 says it for all
        sys.exit(2)
    return Order.load(text)


def _run(given: Order, runtime: Runtime) -> None:
    """Train; exits with a message where the user has something to mend, as a signal would after one."""
    pause_collection()  # until the first step
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
