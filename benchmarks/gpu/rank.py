"""Run one rank of a group of checks: `python -m benchmarks.gpu.rank DEVICE FACTOR FOLDER CHECK...`.

Rank 0 appends a line of JSON to FOLDER/results when a check begins and when it ends.  A failed check ends the process,
so that the next check starts in a new process.  FACTOR multiplies the deadlines of the checks.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import farandole
from benchmarks.gpu.registry import Context, Skip, checks

RESULTS = "results"
STACKS_BEFORE_S = 2.0
"""A check's stacks are printed this number of seconds before the check's deadline."""


def main(device: str, factor: str, folder: str, *names: str) -> None:
    """Run checks in order on `device`; `factor` multiplies the deadlines."""
    known = checks(name.partition(".")[0] for name in names)
    torch.set_num_threads(1)
    with farandole.init(timeout_s=60.0) as runtime:
        wanted = torch.device("cpu") if device == "cpu" else runtime.device
        if wanted.type != device:
            raise RuntimeError(
                f"expected a {device} device for this rank, got {wanted}; check CUDA_VISIBLE_DEVICES"
            )
        for number, name in enumerate(names):
            own = Path(folder, f"check-{number}")
            own.mkdir(exist_ok=True)
            deadline_s = known[name].deadline_s * float(factor)
            faulthandler.dump_traceback_later(max(1.0, deadline_s - STACKS_BEFORE_S))
            _tell(runtime, folder, {"check": name, "event": "begin"})
            context = Context(runtime, wanted, own)
            torch.manual_seed(0)
            began = time.perf_counter()
            try:
                figures = known[name].run(context)
                context.synchronize()
                result: dict[str, Any] = {"status": "passed", "figures": figures}
            except Skip as reason:
                result = {"status": "skipped", "reason": str(reason), "figures": {}}
            seconds = time.perf_counter() - began
            runtime.comm.barrier()  # a failed rank has already ended the job
            faulthandler.cancel_dump_traceback_later()
            _tell(runtime, folder, {"check": name, "event": "end", "seconds": seconds, **result})
            if wanted.type == "cuda":
                torch.cuda.empty_cache()


def _tell(runtime: Any, folder: str, message: dict[str, Any]) -> None:
    if runtime.rank == 0:
        with open(Path(folder, RESULTS), "a") as file:
            file.write(json.dumps(message) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
