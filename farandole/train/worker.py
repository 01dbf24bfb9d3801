"""One rank of a training job.

Under farandole's launcher it is a module to run, `python -m farandole.train.worker ORDER`; the launching process has checked ORDER.
Under another launcher every rank reads the command itself: `join`.
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
    """Return the order that rank 0 made from the request; if it is refused, end all ranks."""
    text, refused = "", ""
    if runtime.rank == 0:
        try:
            start = check(request, runtime.size)
            check_memory(start.config, runtime.local_size)
            make_task(start.config)
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
    """Train; exit with a message for errors that the user can fix, and with the status of a signal after one."""
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
